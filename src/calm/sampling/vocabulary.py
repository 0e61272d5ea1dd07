"""placeholder"""

from torch import Tensor

from calm.scores.vocabulary import most_probable_words


class VocabularySearch:
    def __init__(self, words: Tensor):
        self.words = words

    def __call__(self, states: Tensor) -> Tensor:
        return most_probable_words(states, self.words)
