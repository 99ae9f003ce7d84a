"""How large the report is, and how fast a browser opens it: the demo's, and a large one.

PYTHONPATH=src python lab/report.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.pages import large_report, measure_opening, started


def main() -> None:
    with tempfile.TemporaryDirectory() as place, started() as browser:
        if browser is None:
            print("no Chromium is on the PATH, so the report is not opened")
            return
        folder = Path(place)
        demo = [sys.executable, "-m", "eclip", "demo", "-o", str(folder / "demo")]
        subprocess.run(demo, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print("report                      size  first paint  timeline drawn  (medians of five)")
        for title, page in (
            ("the demo's", folder / "demo" / "report.html"),
            ("8 workers x 2,000 kernels", large_report(folder)),
        ):
            opening = measure_opening(browser, page)
            print(
                f"{title:25} {page.stat().st_size / 1e6:4.2f} MB  {opening.first_paint_ms:8.0f} ms"
                f"  {opening.drawn_ms:11.0f} ms"
            )


if __name__ == "__main__":
    main()
