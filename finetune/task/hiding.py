"""Which tokens of a text are hidden: drawn for each sample alone, so that no batch and no world size matters."""

from dataclasses import dataclass

import numpy as np

from finetune.config.sections.task import MaskedLmSection
from finetune.data.batch import IGNORED
from finetune.data.features import Features
from finetune.runtime.seeds import derive


@dataclass(frozen=True)
class Hiding:
    """Hides tokens as BERT does (Devlin et al., 2018, arXiv:1810.04805)."""

    section: MaskedLmSection
    mask_id: int
    ordinary_ids: np.ndarray  # the tokens that may stand where one is replaced: all but the special ones

    def __call__(self, features: Features) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that are read and the labels, both int64 [length], drawn from its seed and its id.

        Of the n tokens that may be hidden, `fraction * n` are, rounded, and at least one. Of whole words there are
        as many as fit in, the first one drawn in any case.
        """
        draw = np.random.default_rng(derive(features.seed, "hiding", features.sample_id))
        ids = features.arrays["input_ids"].astype(np.int64)
        hidden = self._chosen(features, draw)
        labels = np.full(len(ids), IGNORED, np.int64)
        labels[hidden] = ids[hidden]
        lot = draw.random(len(hidden))
        random, kept = self.section.random_fraction, self.section.kept_fraction
        replaced = hidden[lot < random]
        ids[replaced] = draw.choice(self.ordinary_ids, len(replaced))
        ids[hidden[lot >= random + kept]] = self.mask_id
        return ids, labels

    def _chosen(self, features: Features, draw: np.random.Generator) -> np.ndarray:
        places = np.flatnonzero(features.arrays["is_target"])
        wanted = max(1, round(self.section.fraction * len(places)))
        if not self.section.whole_words:
            return np.sort(draw.choice(places, wanted, replace=False))
        words = np.cumsum(features.arrays["is_word_start"])[places]  # the number of each token's word
        numbers, sizes = np.unique(words, return_counts=True)
        turn = draw.permutation(len(numbers))
        chosen, num_chosen = [turn[0]], int(sizes[turn[0]])
        for each in turn[1:]:
            if num_chosen + sizes[each] <= wanted:
                chosen.append(each)
                num_chosen += int(sizes[each])
        return places[np.isin(words, numbers[chosen])]
