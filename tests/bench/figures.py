"""A figure as a bench gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, once a round."""

    what: str
    values: Sequence[float]
    unit: str
    """"" for a ratio."""
    aim: str = ""

    @property
    def median(self) -> float:
        return median(self.values)

    def to_json(self) -> dict[str, object]:
        """For --json."""
        return {
            "what": self.what,
            "median": self.median,
            "lowest": min(self.values),
            "highest": max(self.values),
            "rounds": len(self.values),
            "unit": self.unit,
            "aim": self.aim or None,
        }

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        spread = f" ({_short(min(self.values))}–{_short(max(self.values))}, {len(self.values)} rounds)"
        aim = f"   aim: {self.aim}" if self.aim else ""
        return f"{self.what}: {_short(self.median)}{unit}{spread if len(self.values) > 1 else ''}{aim}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
