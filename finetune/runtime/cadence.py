"""When something is due."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """Every so many steps, and always at the last one; so nothing is special after the loop."""

    every_steps: int | None  # None: only at the last step
    num_steps: int

    def due(self, step: int) -> bool:
        """Tell whether it is due once `step` steps are done."""
        return step == self.num_steps or (self.every_steps is not None and step % self.every_steps == 0)


@dataclass(frozen=True)
class Never:
    """Never due."""

    def due(self, step: int) -> bool:
        """Return False."""
        return False
