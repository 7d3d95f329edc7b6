"""The workloads: a model, documents of certain lengths, and the competitors that train on them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, Literal, TypeVar

Choice = TypeVar("Choice")


class Form(Enum):
    """How large everything is that is measured."""

    FULL = 0
    QUICK = 1
    TINY = 2  # every path of the code; the figures say nothing

    def choose(self, full: Choice, quick: Choice, tiny: Choice) -> Choice:
        """Return the value of this form."""
        return (full, quick, tiny)[self.value]


OURS = ("ours equal", "ours", "ours tuned")
EQUAL = ("bare", "accelerate", "trainer", "trl equal", "ours equal", "ours")
"""Competitors that take the same samples in the same steps: their losses must agree."""

BEST_OF_TRL = ("trl packing", "trl grouped", "trl padding-free")

TRIED = ("bare", "trainer", "ours")
"""Competitors of the tiny form."""

MIN_DOCUMENTS = 2000


@dataclass(frozen=True)
class Sizes:
    """A Llama's sizes."""

    vocabulary: int = 8192
    width: int = 256
    inner: int = 688
    layers: int = 6

    def values(self) -> dict[str, Any]:
        """Return them as transformers' LlamaConfig calls them."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 32,
            "num_key_value_heads": max(1, self.width // 64),
            "max_position_embeddings": 2048,
        }


@dataclass(frozen=True)
class Workload:
    """What everybody trains on: `length` is the median of a lognormal distribution, or the length of every document."""

    name: str
    title: str
    competitors: tuple[str, ...]
    rounds: int
    kind: Literal["lognormal", "fixed", "gsm8k"] = "lognormal"
    sizes: Sizes = field(default_factory=Sizes)
    length: int = 128
    max_length: int = 1024
    batch: int = 8
    warm_up: int = 3
    logs_every: int = 10  # steps; none of the competitors logs more often than another

    @property
    def is_sft(self) -> bool:
        """Tell whether a document is a question and an answer, of which only the answer is trained on."""
        return self.kind != "fixed"

    @property
    def documents(self) -> int:
        """Return how many documents there are: enough for sorting and packing to work as on real data."""
        return max(self.steps * self.batch, 1 if self.kind == "fixed" else MIN_DOCUMENTS)

    @property
    def steps(self) -> int:
        """Return how many steps are taken; the cost of the last is unknown, because nothing follows it."""
        return self.warm_up + self.rounds + 1

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Workload":
        """Return the workload of a record."""
        return cls(**{**record, "sizes": Sizes(**record["sizes"]), "competitors": tuple(record["competitors"])})


SMALL = Sizes(width=128, inner=344, layers=4)
TINY = Sizes(vocabulary=1024, width=64, inner=172, layers=2)


def equivalence(form: Form) -> Workload:
    """Return the workload on which the losses are compared before anything is timed."""
    competitors, rounds = (TRIED, 3) if form is Form.TINY else (EQUAL, 20)
    sizes = Sizes(vocabulary=2048, width=64, inner=172, layers=3)
    title = f"{rounds} steps, losses compared"
    return Workload("equivalence", title, competitors, rounds, "gsm8k", sizes, batch=4, warm_up=0, logs_every=1)


def memory(form: Form) -> Workload:
    """Return the workload of a few steps whose peak memory is measured, in processes that have done nothing else."""
    few, sizes = (TRIED, TINY) if form is Form.TINY else (("trainer", "trl equal", "ours"), Sizes())
    return Workload("memory", "peak memory of three steps", few, 1, sizes=sizes, length=256, warm_up=1)


def workloads(form: Form) -> tuple[Workload, ...]:
    """Return what is timed."""
    if form is Form.TINY:
        return (replace(_quick()[0], competitors=TRIED, rounds=1, sizes=TINY, warm_up=1),)
    return form.choose(_full, _quick, _quick)()


def _full() -> tuple[Workload, ...]:
    varying = ("bare", "trainer", "trainer grouped", "trl equal", *BEST_OF_TRL, "ours", "ours tuned")
    return (
        Workload("lognormal", "lengths lognormal, answers are targets", varying, 25),
        Workload("gsm8k", "GSM8K, answers are targets", (*varying, "trl default"), 25, "gsm8k", max_length=512),
        _fixed(("bare", "accelerate", "trainer", "trl equal", *OURS), 30),
        _tiny((*EQUAL, "trl default"), 400),
    )


def _quick() -> tuple[Workload, ...]:
    """Return smaller models, and fewer workloads, rounds and competitors."""
    few = ("bare", "trainer", "trl equal", "ours", "ours tuned")
    main = (*few, "trainer grouped", "trl grouped", "trl packing")
    return (
        Workload(
            *("lognormal", "lengths lognormal, answers are targets", main, 8, "lognormal", SMALL),
            batch=6,
            warm_up=1,
        ),
        Workload("gsm8k", "GSM8K, answers are targets", few, 4, "gsm8k", SMALL, max_length=512, warm_up=1),
        _fixed(("bare", *OURS), 10),
        _tiny((*EQUAL, "trl default"), 120),
    )


def _fixed(competitors: tuple[str, ...], rounds: int) -> Workload:
    return Workload("fixed", "fixed full length", competitors, rounds, "fixed", Sizes(), 256, 256, 2)


def _tiny(competitors: tuple[str, ...], rounds: int) -> Workload:
    return Workload("tiny", "16 tokens a step", competitors, rounds, "fixed", TINY, 16, 16, 1, 30)
