"""What the names of a mesh's dimensions mean for models whose division is ours: `dp`, `tp` and their like.

A function of the user's own gives them whatever meaning it likes.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfit.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MEANINGS = {
    "pp": "stages of a pipeline",
    "replicate": "copies of the model that share their gradients (DDP; with fsdp: HSDP)",
    "fsdp": "parameters, gradients and optimizer state divided (FSDP2)",
    "dp": "the same as fsdp",
    "cp": "sequences divided (context parallel)",
    "ep": "experts divided, whole ones on each rank, and the rest as by fsdp (expert parallel)",
    "tp": "layers divided (tensor parallel)",
}
"""The known names, in the order in which they are nested: what communicates most is innermost."""
_ORDER = ("pp", "replicate", "fsdp", "cp", "ep", "tp")
_ALIASES = {"dp": "fsdp"}

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class MeshDimensions:
    """The dimensions of a mesh by what they mean. Those of size 1 divide nothing and are left out."""

    mesh: Sizes
    """As the user wrote it, outermost first."""

    def __post_init__(self) -> None:
        """Refuse names that mean nothing, and orders in which torch cannot nest them."""
        text = ",".join(f"{name}={size}" for name, size in self.mesh)
        for name, _ in self.mesh:
            if name not in MEANINGS:
                close = difflib.get_close_matches(name, MEANINGS, n=1)
                meant = f" Did you mean {close[0]}?" if close else ""
                known = "; ".join(f"{known}: {meaning}" for known, meaning in MEANINGS.items())
                raise OptionError(
                    f"--mesh {text}: there is no dimension {name!r:.60} for a built-in or hf: model.{meant} "
                    f"The dimensions are {known}."
                )
        meant_names = [_ALIASES.get(name, name) for name, _ in self.mesh]
        if len(set(meant_names)) != len(meant_names):
            raise OptionError(f"--mesh {text}: dp and fsdp are the same; give one of them.")
        right = sorted(self.mesh, key=lambda part: _ORDER.index(_ALIASES.get(part[0], part[0])))
        if right != list(self.mesh):
            raise OptionError(
                f"--mesh {text}: the last dimension fills a node first, so what communicates most comes "
                f"last; write --mesh {','.join(f'{name}={size}' for name, size in right)}."
            )

    def size(self, meaning: str) -> int:
        """Return how many ranks a dimension has; 1 if there is none."""
        return next((size for name, size in self.mesh if _ALIASES.get(name, name) == meaning), 1)

    def names(self, *meanings: str) -> tuple[str, ...]:
        """Return what the user calls these dimensions, of those that divide something."""
        return tuple(name for name, size in self.mesh if _ALIASES.get(name, name) in meanings and size > 1)

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 divides the parameters: among the ranks of `fsdp`, and of `cp` and `ep` too."""
        return self.size("fsdp") * self.size("cp") * self.size("ep") > 1

    def copies(self, mesh: DeviceMesh) -> DeviceMesh | None:
        """Return the ranks that have a copy of the model, or its shards, each with other data; None if one.

        Ranks that have parts of a sequence are such copies: each has a gradient of its own.
        """
        return self._sharing(mesh, "fsdp", "cp", "ep")

    def copies_of_experts(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the ranks that have the same experts, or shards of them; a mesh of one if no others do."""
        if self.names("fsdp", "cp"):
            found = self._sharing(mesh, "fsdp", "cp")
            assert found is not None, "one of them divides something"
            return found
        (name,) = self.names("ep")
        one = mesh[name]._unflatten(0, (1, self.size("ep")), ("one", f"own_{name}"))["one"]
        whole = self.of(mesh, "replicate")
        return one if whole is None else type(mesh)._concatenate([whole, one])

    def _sharing(self, mesh: DeviceMesh, *sharded: str) -> DeviceMesh | None:
        """Return the mesh of copies, of which the ranks of these dimensions have shards."""
        shards, whole = self.names(*sharded), self.of(mesh, "replicate")
        if len(shards) < 2:
            return self.of(mesh, "replicate", *sharded)
        # torch's trainers, too, make one dimension of them.
        flat = mesh[shards]._flatten("_".join(shards))
        return flat if whole is None else type(mesh)._concatenate([whole, flat])

    def of(self, mesh: DeviceMesh, *meanings: str) -> DeviceMesh | None:
        """Return the part of the mesh that has these dimensions; None if none of them divides anything."""
        names = self.names(*meanings)
        if not names:
            return None
        return mesh[names if len(names) > 1 else names[0]]
