// What the theme leaves out for screen readers and keyboards. It adds some of these parts late.
const mend = () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const buttons of document.querySelectorAll("nav.md-code__nav")) buttons.role = "none";
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
};
mend();
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
