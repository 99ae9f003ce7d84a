"""Two models on one GPU: plan, run on the built-in simulator, measure. Needs no GPU."""

import eclip

# Which set of compute units each kernel of each model uses.
plan = eclip.plan("albert:8,vgg19:8", policy="eclip")
print(plan)

# The same plan runs on a GPU with device="cuda".
log = eclip.run(plan, seconds=1)
measures = eclip.measure(log)
print(f"throughput {measures.stp:.2f} of one model alone, fairness {measures.fairness:.2f}")
for worker in measures.workers:
    print(f"  {worker.name}: {worker.rate_rps:.0f} requests/s, p99 {worker.p99_ms:.2f} ms")

eclip.save(plan, "plan.json")  # eclip explain plan.json shows it in words
