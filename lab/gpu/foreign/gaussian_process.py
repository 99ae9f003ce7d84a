"""GPyTorch: an exact Gaussian process, fitted and asked."""

import gpytorch
import torch
from telling import tell

torch.manual_seed(0)
x = torch.linspace(0, 1, 400, device="cuda")
y = torch.sin(x * 12) + 0.1 * torch.randn_like(x)


class Process(gpytorch.models.ExactGP):
    def __init__(self, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, at):
        return gpytorch.distributions.MultivariateNormal(self.mean(at), self.covariance(at))


likelihood = gpytorch.likelihoods.GaussianLikelihood().cuda()
model = Process(likelihood).cuda().train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
losses = []
for _ in range(40):
    optimizer.zero_grad()
    loss = -evidence(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
tell(torch.stack(losses))
