"""What had to be assumed about a step, as data: its kind, in words, and where."""

from __future__ import annotations

from dataclasses import dataclass

ASSUMPTION_KINDS = ("data", "value", "skipped", "compiled", "device", "runs", "workspace")


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something that had to be assumed, or that a reader of the figures has to know.

    `data`: memory depends on values that nobody knows before training, such as where a router sends tokens.
    `value`: a question about a value was answered without knowing it. `skipped`: something that changes files
    was not done. `compiled`: torch.compile was left out. `device`: what is not known of the device, or not
    counted there. `runs`: which runs of the step were looked at. `workspace`: what kernels allocate inside.
    """

    kind: str
    text: str
    where: str = ""
    """In which module, and (in brackets) at which line of the user's code, as far as that is known."""

    def __str__(self) -> str:
        """One sentence, as it is shown."""
        sentence = _SENTENCES.get(self.kind, "{}").format(self.text)
        return f"{sentence} {self.where}" if self.where else sentence


_SENTENCES = {
    "data": "memory depends on data: {}",
    "skipped": "{} was skipped: a capture writes no tensors and changes no files",
}
