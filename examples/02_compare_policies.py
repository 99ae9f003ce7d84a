"""Which way of sharing the GPU is best for this mix? Needs no GPU."""

import eclip

outcome = eclip.compare(
    "paper/3",  # albert, densenet201 and vgg19, a mix of the ECLIP paper
    ["shared", "timeslice", "model", "masks", "search"],
    seconds=0.5,
    options=eclip.CompareOptions(batches=4, trials=12, trace_ms=5),
)
for name, measures in outcome.measures.items():
    star = "*" if name == outcome.best else " "
    print(f"{star} {name:10} throughput {measures.stp:.3f}, fairness {measures.fairness:.2f}")

outcome.save("comparison")  # plans and run logs
print(eclip.report(outcome, "comparison/report.html"))
