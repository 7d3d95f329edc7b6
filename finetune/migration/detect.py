"""Which trainer a config is for, by keys that only its configs have."""

from finetune.errors import UserError
from finetune.migration.peers.axolotl import AXOLOTL
from finetune.migration.peers.peer import Peer
from finetune.migration.source import PeerFile

PEERS: dict[str, Peer] = {peer.name: peer for peer in (AXOLOTL,)}


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
    if best == 0 or len(likely) > 1:
        what = f"may be one of {' or '.join(likely)}" if best else "has no key that tells whose it is"
        raise UserError(f"--from {file.path}: the config {what}. Write --peer with one of {', '.join(PEERS)}.")
    return PEERS[likely[0]]
