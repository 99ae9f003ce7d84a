"""Requests arrive by themselves: plan for short tails, and see overload in words. Needs no GPU."""

import eclip

# 90 and 300 requests per second; a search is for latency where a mix has rates.
plan = eclip.plan("bert:8@90rps,vgg19:8@300rps", policy="search", batches=3)
for worker in eclip.measure(eclip.run(plan, seconds=2)).workers:
    print(
        f"{worker.name}: offered {worker.offered_rps:.0f}/s, served {worker.rate_rps:.0f}/s, "
        f"p99 {worker.p99_ms:.2f} ms"
    )

# Far more than the GPU can serve.
busy = eclip.plan("bert:8@5000rps,vgg19:8@300rps", policy="shared")
for sentence in eclip.measure(eclip.run(busy, seconds=0.5)).missed:
    print(sentence)
