"""A certificate for readers: ten lines of text for an issue, and one page that needs no network."""

import html
from collections.abc import Iterable, Mapping
from typing import Any

import vit_jax
from vit_jax.diagnosis.certificate import FAULTS, summarise, verdict

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid #ddd; padding: 0.25rem 0.75rem 0.25rem 0; text-align: left;
  vertical-align: top; }
.held { color: #17692e; } .fails { color: #a31515; } .open { color: #666; }
h2 { margin-bottom: 0; }
"""
_STEP = {
    "model": "model", "global_batch_size": "batch", "dtype": "dtype", "step_s": "step, s",
    "mfu": "MFU", "compile_s": "compilation, s", "memory_bytes": "memory, GiB",
    "planned_memory_bytes": "planned, GiB",
}  # fmt: skip
_EXCHANGE = {"axis": "axis", "kind": "exchange", "mib": "MiB", "bytes_per_s": "GB/s"}


def as_text(certificate: Mapping[str, Any]) -> str:
    """The verdict, and a line on each part."""
    lines = [f"{name}: {summarise(part)}" for name, part in certificate["parts"].items()]
    return "\n".join([_head(certificate), *lines, ""])


def as_html(certificate: Mapping[str, Any]) -> str:
    """The parts with their verdicts, then tables of steps, exchanges and software."""
    parts = certificate["parts"]
    rows = [_row(name, part) for name, part in parts.items()]
    tables = [
        _table("Steps", _STEP, parts.get("steps", {}).get("rows", ())),
        _table("Exchanges between devices", _EXCHANGE, parts.get("exchanges", {}).get("rows", ())),
        _table("Software", {"name": "name", "value": "version"}, (
            {"name": name, "value": value}
            for name, value in parts.get("devices", {}).get("software", {}).items()
        )),
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>vit_jax certificate</title>'
        f"<style>{_STYLE}</style><h1>Certificate</h1><p>{_head(certificate)}.</p>"
        f"<table>{''.join(rows)}</table>{''.join(tables)}</html>\n"
    )


def _head(certificate: Mapping[str, Any]) -> str:
    found = "All that was checked holds" if certificate["held"] else "Something does not hold"
    return f"{found}: vit_jax {vit_jax.__version__}, {certificate['made']}"


def _row(name: str, part: Mapping[str, Any]) -> str:
    word, found = verdict(part)
    kind = "fails" if word in FAULTS else "held" if word == "holds" else "open"
    return (
        f'<tr><th>{html.escape(name)}</th><td class="{kind}">{word}</td>'
        f"<td>{html.escape(found)}</td><td>{part.get('took_s', 0):.0f} s</td></tr>"
    )


def _table(title: str, heads: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of those `heads`, {key of a row: head of its column}; "" of no rows."""
    lines = [
        f"<tr>{''.join(f'<td>{html.escape(_shown(key, row.get(key)))}</td>' for key in heads)}</tr>"
        for row in rows
    ]
    if not lines:
        return ""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads.values())
    return f"<h2>{title}</h2><table><tr>{head}</tr>{''.join(lines)}</table>"


def _shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in ("memory_bytes", "planned_memory_bytes"):
        return f"{value / 2**30:.2f}"
    if key == "bytes_per_s":
        return f"{value / 1e9:.3g}"
    if key == "mfu":
        return f"{value:.0%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
