"""Digests of an array's bytes, block by block: whoever reads a block knows whether it is as it was written."""

import xxhash

BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 16


class BlockDigests:
    """The digests of bytes that come piece by piece, one for every block of them."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._block = xxhash.xxh3_128()
        self._room = BLOCK_BYTES

    def update(self, content: memoryview) -> None:
        """Take in the next bytes."""
        while len(content):
            piece, content = content[: self._room], content[self._room :]
            self._block.update(piece)
            self._room -= len(piece)
            if self._room == 0:
                self._done += self._block.digest()
                self._block, self._room = xxhash.xxh3_128(), BLOCK_BYTES

    @property
    def digests(self) -> bytes:
        """Return the digests so far, end to end; that of the last block is of what there is of it."""
        begun = self._block.digest() if self._room < BLOCK_BYTES else b""
        return bytes(self._done) + begun

    @property
    def rolled(self) -> str:
        """Return one digest of all bytes so far."""
        return xxhash.xxh3_128_hexdigest(self.digests)


def num_blocks(size_bytes: int) -> int:
    """Return into how many blocks so many bytes are cut."""
    return -(-size_bytes // BLOCK_BYTES)
