"""The layer of the autoencoder and of the chain head: x + SwiGLU(RMSNorm(x)), on each vector by itself."""

from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, size: int, intermediate_size: int, eps: float):
        super().__init__()
        self.norm = nn.RMSNorm(size, eps=eps)
        self.gate = nn.Linear(size, intermediate_size, bias=False)
        self.up = nn.Linear(size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))
