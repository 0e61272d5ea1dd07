"""The chain rule inside of a chunk, beyond the paper: the next vector is drawn as the tokens that it stands for.

    P(chunk | hidden) = Π_k P(x_k | hidden, x_<k)     P(x_k = v | …) = softmax over v of w_v·state_k
    state_k = layers( W_k·hidden + the words before k, each through a map for its distance )

The words w_v are the autoencoder's: read and written in the space that it has learnt, which stays as it is, or, as
`own_words`, is where words of the head's own begin. The backbone, which is most of a model, still makes one step for K
tokens; what is repeated for each token is small. No noise and no distance of vectors: this head has likelihoods, and a
temperature costs it nothing.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from calm.heads.common import NORM_EPS
from calm.models.layer import Layer
from calm.products import linear

INITIAL_SPREAD = 0.02


class ChainHead(nn.Module):
    def __init__(
        self, hidden_size: int, word_size: int, chunk_size: int, num_layers: int, own_words: int | None = None
    ):
        super().__init__()
        self.own_words = None if own_words is None else nn.Embedding(own_words, word_size)  # else the autoencoder's
        self.word_size, self.distances = word_size, chunk_size - 1
        self.hidden = nn.Linear(hidden_size, chunk_size * word_size)
        self.before = nn.Linear(self.distances * word_size, word_size, bias=False) if self.distances else None
        self.layers = nn.Sequential(*(Layer(word_size, 8 * word_size // 3, NORM_EPS) for _ in range(num_layers)))
        self.norm = nn.RMSNorm(word_size, eps=NORM_EPS)

    def initialize(self) -> None:
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=INITIAL_SPREAD)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, hidden: Tensor, before: Tensor, first: int = 0) -> Tensor:
        """States of the tokens from `first` to the one behind the words `before`.

        Hidden states (..., H) and vectors of the chunk's first n < K words (..., n, d) → (..., n + 1 - first, d). The
        words may have more dimensions in front: several beginnings behind one hidden state.
        """
        last = before.shape[-2] + 1
        rows = slice(first * self.word_size, last * self.word_size)
        states = linear(hidden, self.hidden.weight[rows], self.hidden.bias[rows])
        states = states.unflatten(-1, (last - first, self.word_size))  # (..., n + 1 - first, d)
        if self.before is not None:
            window = F.pad(before, (0, 0, self.distances, 0)).unfold(-2, self.distances, 1)  # (..., n + 1, d, K - 1)
            states = states + self.before(window[..., first:, :, :].flatten(-2))
        return self.norm(self.layers(states))
