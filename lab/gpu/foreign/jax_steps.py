"""JAX: a jitted training step; XLA makes CUDA graphs of its own."""

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true"

import jax
import jax.numpy as jnp
import numpy as np
from telling import tell

assert jax.default_backend() == "gpu"
keys = jax.random.split(jax.random.PRNGKey(0), 8)
weights = [jax.random.normal(key, (1024, 1024)) / 32 for key in keys]


def loss_of(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return (x**2).mean()


@jax.jit
def step(weights, x):
    loss, slopes = jax.value_and_grad(loss_of)(weights, x)
    return [w - 0.1 * s for w, s in zip(weights, slopes, strict=True)], loss


losses = []
for number in range(80):
    weights, loss = step(weights, jax.random.normal(jax.random.PRNGKey(number), (512, 1024)))
    losses.append(loss)
tell(np.array(losses))
