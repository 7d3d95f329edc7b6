"""Which trainer a config is for, by keys that only its configs have."""

from finetune.errors import UserError
from finetune.migration.peers.axolotl import AXOLOTL
from finetune.migration.peers.llama_factory import LLAMA_FACTORY
from finetune.migration.peers.ms_swift import MS_SWIFT
from finetune.migration.peers.peer import Peer
from finetune.migration.peers.torchtune import TORCHTUNE
from finetune.migration.peers.trainer import TRAINER
from finetune.migration.peers.trl import TRL
from finetune.migration.source import PeerFile

PEERS: dict[str, Peer] = {peer.name: peer for peer in (AXOLOTL, LLAMA_FACTORY, TRL, MS_SWIFT, TORCHTUNE, TRAINER)}


def detect(file: PeerFile, name: str | None = None) -> Peer:
    """Return the peer of this name, or the one whose signs the file has most of; raises UserError if none is clear."""
    if name is not None:
        if name.lower().replace("-", "_") not in PEERS:
            raise UserError(f"--peer {name}: choose one of {', '.join(PEERS)}.")
        return PEERS[name.lower().replace("-", "_")]
    keys = {leaf.pattern for leaf in file.leaves.values()}
    keys |= {part for key in keys for part in (key.partition(".")[0].removesuffix("[]"), key.rpartition(".")[2])}
    counts = {peer.name: len(peer.signs & keys) for peer in PEERS.values()}
    best = max(counts.values())
    likely = [peer for peer, count in counts.items() if count == best]
    if len(likely) > 1 and TRAINER.name in likely:
        likely.remove(TRAINER.name)  # the others have its keys, too
    if best == 0 or len(likely) > 1:
        what = f"may be one of {' or '.join(likely)}" if best else "has no key that tells whose it is"
        raise UserError(f"--from {file.path}: the config {what}. Write --peer with one of {', '.join(PEERS)}.")
    return PEERS[likely[0]]
