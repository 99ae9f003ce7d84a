"""Requests arrive by themselves: plan for their bound, and see overload in words. Needs no GPU."""

import eclip

# bert gets 90 requests per second and is to answer 99 of 100 within 15 ms; vgg19 gives way to it.
plan = eclip.plan("bert:8@90rps/15ms,vgg19:8@background", policy="search", batches=1)
print(plan.why)
for worker in eclip.measure(eclip.run(plan, seconds=2)).workers:
    print(
        f"{worker.name}: served {worker.rate_rps:.0f}/s, {worker.ratio:.0%} of its rate alone, "
        f"p99 {worker.p99_ms:.2f} ms"
    )

# Far more than the GPU can serve.
busy = eclip.plan("bert:8@5000rps,vgg19:8@300rps", policy="shared")
for sentence in eclip.measure(eclip.run(busy, seconds=0.5)).missed:
    print(sentence)
