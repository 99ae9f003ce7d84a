"""Search for the plan that does the most work per joule, and see what was tried. Needs no GPU."""

import eclip

plan = eclip.search("bert:8,resnet50:8", "energy", batches=4, verify=3)
print(plan.why)

# The evidence holds every plan of the final trials, and why some were refused.
for trial in plan.evidence.trials:
    chosen = "->" if trial.chosen else "  "
    stp = sum(trial.ratios)
    refused = f" (refused: {'; '.join(trial.refused)})" if trial.refused else ""
    print(
        f"{chosen} {trial.label:32} STP {stp:.3f}, {1000 * stp / trial.power_w:.2f} per kJ{refused}"
    )
