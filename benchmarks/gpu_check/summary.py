"""The figures of all parts that are asked for first, beside each other."""

from typing import Any

SPEEDS = {"speed": ("speed", "live"), "speed-large": ("speed-large", "live-large")}


def summary(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """{"summary": {part: {measurement: {"ms": step, "over_resident": ratio}}}}, of what was measured so far."""
    items = {
        name: {item: found for part in both for item, found in parts.get(part, {}).get("items", {}).items()}
        for name, both in SPEEDS.items()
    }
    tables = {name: table_of(found) for name, found in items.items()}
    return {"summary": {name: table for name, table in tables.items() if table}}


def table_of(items: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ratios to every row on the device, in the same precision; the replay's own ratio is by rounds."""
    resident = {
        name.partition(",")[0]: item["resident_ms"]
        for name, item in items.items()
        if name.endswith("replay 20 %") and "resident_ms" in item
    }
    table = {f"{precision}, resident": {"ms": round(ms, 3)} for precision, ms in resident.items()}
    for name, item in items.items():
        alone = resident.get(name.partition(",")[0])
        if item.get("ms"):
            over = item.get("to_resident") or (item["ms"] / alone if alone else None)
            table[name] = {"ms": round(item["ms"], 3)} | ({"over_resident": round(over, 3)} if over else {})
    return table
