"""What the hidden state tells the tokens of the next chunk beside the latent: a linear map to each token's state.

A model with a variational head has one. The latent says which of the possible chunks it is, the hidden state how
probable words are: what is alike in all possible chunks need not pass through the latent. It begins at zero.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class Readout(nn.Linear):
    def __init__(self, hidden_size: int, chunk_size: int, state_size: int):
        super().__init__(hidden_size, chunk_size * state_size)
        self.state_size = state_size

    def initialize(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def part(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """For the tokens from `first` to before `last`: (..., H) → (..., last - first, d)."""
        rows = slice(first * self.state_size, last * self.state_size)
        return F.linear(hidden, self.weight[rows], self.bias[rows]).unflatten(-1, (last - first, self.state_size))
