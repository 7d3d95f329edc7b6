"""A prepared set as something to learn from."""

from functools import partial

from finetune.config.sections.data import BatchingSection, DataSection
from finetune.data.order.by_length import ByLength
from finetune.data.order.order import Order
from finetune.data.order.pool import Pool, fingerprint_of
from finetune.data.order.set_order import set_order, tokens_per_position
from finetune.data.prepared.store import PreparedSet


def set_pool(prepared: PreparedSet, section: DataSection, *, seed: int, key: str) -> Pool:
    """Return the set's samples in an order drawn from the seed; `key` is the source's place in the job YAML."""
    batching, max_length = section.batching, section.longest
    order = set_order(prepared.lengths, seed=seed, shuffle=section.shuffle, batching=batching, max_length=max_length)
    epoch_tokens = int(prepared.lengths.sum())
    if batching.by == "samples":
        return Pool(prepared, order, _content(prepared), epoch_tokens)
    budget = tokens_per_position(batching, max_length=max_length)
    lines = partial(_told, order, key=key, unit=batching.unit, budget=budget, epoch_tokens=epoch_tokens)
    fingerprint = fingerprint_of(_content(prepared), batching.by, budget)
    return Pool(prepared, order, fingerprint, epoch_tokens, lines)


def _content(prepared: PreparedSet) -> str:
    """Return the fingerprint of the samples: another one where names of control tokens in rows were made plain text.

    Sets from before that was done have none of these rows, or other samples; a checkpoint is refused for those alone.
    """
    if prepared.counts.control_rows == 0:
        return prepared.fingerprint
    return fingerprint_of(prepared.fingerprint, "names of control tokens are text")


def by_length(pool: Pool, batching: BatchingSection, *, seed: int, global_batch_size: int) -> Pool:
    """Return the pool with its samples sorted by length within as many steps as the section says, if any."""
    steps = batching.length_window_steps
    if steps == 0:
        return pool
    order = ByLength(
        pool.order, pool.samples.lengths_of, seed=seed, global_batch_size=global_batch_size, window_steps=steps
    )
    fingerprint = pool.fingerprint if steps == 1 else fingerprint_of(pool.fingerprint, "by length", steps)
    return Pool(pool.samples, order, fingerprint, pool.epoch_tokens, pool.lines)


def _told(order: Order, num_positions: int, *, key: str, unit: str, budget: int, epoch_tokens: int) -> tuple[str, ...]:
    """Return how many groups an epoch has and how full they are."""
    each = order.num_positions or 0
    share = epoch_tokens / (each * budget) if each else 0.0
    return (f"{key}: {epoch_tokens:,} tokens in {each:,} {unit} of at most {budget:,}: {share:.1%} full",)
