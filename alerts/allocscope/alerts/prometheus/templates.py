"""Sizes and durations in Prometheus's templates, as `allocscope.model.figures` writes them everywhere else.

Its own functions write `79.6Gi` and `1h 30m 0s`. Templates cannot divide; a query can.
"""

from __future__ import annotations

from allocscope.model.figures import DURATIONS, UNITS


def defined(text: str) -> str:
    """The text with the templates that it calls defined in front, as each annotation must have them for itself."""
    return "".join(definition for name, definition in _DEFINITIONS.items() if f'template "{name}"' in text) + text


def size(value: str) -> str:
    """What writes a value, in bytes."""
    return f'{{{{ template "size" {value} }}}}'


def duration(value: str) -> str:
    """What writes a value, in seconds."""
    return f'{{{{ template "duration" {value} }}}}'


def _divided(by: int, form: str) -> str:
    return f'{{{{ printf "%g / {by}" . | query | first | value | printf "{form}" }}}}'


def _chosen(steps: list[tuple[int, str]], otherwise: str) -> str:
    """The first text whose least value is reached. Comparisons of templates want both numbers to be floats."""
    chain = "".join(f"{{{{ else if ge . {least}.0 }}}}{text}" for least, text in steps)
    return f"{{{{ {chain.removeprefix('{{ else ')}{{{{ else }}}}{otherwise}{{{{ end }}}}"


_SIZE = _chosen(
    [(unit_bytes, _divided(unit_bytes, f"%.2f {unit}")) for unit, unit_bytes in UNITS],
    '{{ printf "%.0f" . }} byte{{ if ne . 1.0 }}s{{ end }}',
)
_DURATION = _chosen(
    [*((2 * unit_s, _divided(unit_s, f"%.0f {unit}")) for unit, unit_s in DURATIONS), (10, '{{ printf "%.0f s" . }}')],
    '{{ printf "%.1f" . | reReplaceAll "[.]0$" "" }} s',
)
_DEFINITIONS = {
    "size": f'{{{{ define "size" }}}}{_SIZE}{{{{ end }}}}',
    "duration": f'{{{{ define "duration" }}}}{_DURATION}{{{{ end }}}}',
}
