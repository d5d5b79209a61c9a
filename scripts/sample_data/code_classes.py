"""Renders the Python modules of the code sets: small record classes with the methods such modules usually have.

Every method goes through the fields in the order of `__init__`, so a line in the middle of one is determined by the
lines before it and by the rest of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .draw import Draw

_CASTS = {"str": "{0}", "int": "int({0})", "float": "float({0})"}


@dataclass(frozen=True)
class Kind:
    """A record class to be rendered: its name, plural (snake case), one-line description and (field, type) pairs."""

    name: str
    plural: str
    about: str
    fields: tuple[tuple[str, str], ...]

    @property
    def single(self) -> str:
        return "".join("_" + c.lower() if c.isupper() else c for c in self.name).lstrip("_")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.fields]

    @property
    def number(self) -> str:
        """The first numeric field."""
        return next(name for name, kind in self.fields if kind != "str")


def init_lines(kind: Kind) -> list[str]:
    head = [f"    def __init__(self, {', '.join(kind.names)}):"]
    return head + [f"        self.{name} = {name}" for name in kind.names]


def to_row_lines(kind: Kind) -> list[str]:
    head = ["    def to_row(self):", '        """The fields as a dict for csv.DictWriter."""', "        row = {}"]
    return [*head, *(f'        row["{name}"] = self.{name}' for name in kind.names), "        return row"]


def from_row_lines(kind: Kind) -> list[str]:
    head = [
        "    @classmethod",
        "    def from_row(cls, row):",
        '        """Build the object from a row of a CSV file."""',
    ]
    body = [f"        {name} = " + _CASTS[cast].format(f'row["{name}"]') for name, cast in kind.fields]
    return [*head, *body, f"        return cls({', '.join(kind.names)})"]


def check_lines(kind: Kind) -> list[str]:
    found = ["    def check(self):", f'        """Raise ValueError if a value of the {kind.about} is impossible."""']
    for name, cast in kind.fields:
        found.append(f"        if {f'self.{name} < 0' if cast != 'str' else f'not self.{name}'}:")
        found.append(
            f'            raise ValueError("{name} must {"not be negative" if cast != "str" else "be given"}")'
        )
    return found


def describe_lines(kind: Kind) -> list[str]:
    head = ["    def describe(self):", "        lines = []"]
    body = [f'        lines.append(f"{name.replace("_", " ")}: {{self.{name}}}")' for name in kind.names]
    return [*head, *body, '        return "\\n".join(lines)']


def equal_lines(kind: Kind) -> list[str]:
    return [
        "    def __eq__(self, other):",
        f"        if not isinstance(other, {kind.name}):",
        "            return NotImplemented",
        "        return self.to_row() == other.to_row()",
    ]


def scaled_lines(kind: Kind) -> list[str]:
    changed = ", ".join(f"self.{name} * factor" if name == kind.number else f"self.{name}" for name in kind.names)
    return [
        "    def scaled(self, factor):",
        f'        """A copy with {kind.number} multiplied by factor."""',
        f"        return {kind.name}({changed})",
    ]


METHODS: dict[str, Callable[[Kind], list[str]]] = {
    "init": init_lines,
    "to_row": to_row_lines,
    "from_row": from_row_lines,
    "check": check_lines,
    "describe": describe_lines,
    "equal": equal_lines,
    "scaled": scaled_lines,
}


def class_lines(kind: Kind, methods: list[str]) -> list[str]:
    """The class with the methods in the given order."""
    found = [f"class {kind.name}:", f'    """A {kind.about}."""']
    for method in methods:
        found += ["", *METHODS[method](kind)]
    return found


def function_lines(draw: Draw, kind: Kind) -> list[str]:
    """Module functions about one class: reading, indexing, a total."""
    key = kind.names[0]
    load = [
        f"def load_{kind.plural}(path):",
        f'    """Read {kind.plural.replace("_", " ")} from a CSV file and check each of them."""',
        f"    {kind.plural} = []",
        '    with open(path, newline="", encoding="utf-8") as handle:',
        "        for row in csv.DictReader(handle):",
        f"            {kind.single} = {kind.name}.from_row(row)",
        f"            {kind.single}.check()",
        f"            {kind.plural}.append({kind.single})",
        f"    return {kind.plural}",
    ]
    index = [
        f"def index_{kind.plural}({kind.plural}):",
        f'    """A dict from {key} to {kind.about}; a {key} that occurs twice is an error."""',
        "    found = {}",
        f"    for {kind.single} in {kind.plural}:",
        f"        if {kind.single}.{key} in found:",
        f'            raise ValueError(f"{key} {{{kind.single}.{key}}} occurs twice")',
        f"        found[{kind.single}.{key}] = {kind.single}",
        "    return found",
    ]
    total = [
        f"def total_{kind.number}({kind.plural}):",
        f'    """Sum of {kind.number} over all {kind.plural.replace("_", " ")}."""',
        f"    return sum({kind.single}.{kind.number} for {kind.single} in {kind.plural})",
    ]
    parts = [load, *draw.shuffled([index, total])]
    return [line for part in parts for line in ["", "", *part]]


def _kind(name: str, plural: str, about: str, fields: str) -> Kind:
    pairs = [field.split(":") for field in fields.split()]
    return Kind(name, plural, about, tuple((pair[0], pair[1]) for pair in pairs))


KINDS: tuple[Kind, ...] = (
    _kind("Station", "stations", "tide station on the coast", "code:str name:str depth:float height:float"),
    _kind("Vessel", "vessels", "ship that calls at the harbour", "call_sign:str owner:str draught:float crew_size:int"),
    _kind("Berth", "berths", "place where a ship can lie", "label:str quay:str length:float bollards:int"),
    _kind("Pilot", "pilots", "pilot with a licence", "licence:str surname:str trips:int fee:float"),
    _kind("Crate", "crates", "crate in the warehouse", "serial:str content:str weight:float layers:int"),
    _kind("Lantern", "lanterns", "lamp on a buoy or mole", "mark:str colour:str seconds:float candela:int"),
    _kind("Orchard", "orchards", "field with fruit trees", "parcel:str variety:str trees:int slope:float"),
    _kind("Hive", "hives", "beehive with its queen", "tag:str breed:str frames:int honey:float"),
    _kind("Recipe", "recipes", "recipe of the bakery", "title:str author:str minutes:int flour:float"),
    _kind("Oven", "ovens", "oven in the bakery", "oven_id:str maker:str trays:int degrees:float"),
    _kind("Loom", "looms", "loom in the weaving hall", "loom_no:str pattern:str shafts:int width:float"),
    _kind("Tramcar", "tramcars", "car of the tramway", "fleet_no:str depot:str seats:int mileage:float"),
    _kind("Signal", "signals", "signal at a crossing", "signal_id:str street:str lamps:int delay:float"),
    _kind("Ticket", "tickets", "ticket that was sold", "ticket_no:str zone:str price:float rides:int"),
    _kind("Volume", "volumes", "book in the library", "shelf_mark:str writer:str pages:int value:float"),
    _kind("Reader", "readers", "person with a library card", "card:str street:str loans:int fines:float"),
    _kind("Sensor", "sensors", "sensor in the greenhouse", "channel:str unit:str samples:int offset:float"),
    _kind("Pump", "pumps", "pump of the waterworks", "pump_id:str valley:str stages:int litres:float"),
)
