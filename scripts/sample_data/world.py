"""Names and things of the fictional world; every draw of a name within one `World` is a new one."""

from __future__ import annotations

from dataclasses import dataclass

from .draw import Bag, Draw

_WOMEN = (
    "Ada Agnes Beatrice Bridget Clara Cora Daphne Edith Elspeth Esther Flora Frances Greta Hazel Helena Ida Ines Iris "
    "Judith Karin Leonie Lydia Mabel Marta Miriam Nadia Nora Olive Petra Rosa Ruth Selma Sylvia Tamsin Thea Ursula "
    "Vera Wanda Winifred Yvonne"
).split()
_MEN = (
    "Albert Anton Arthur Basil Bernard Caspar Cyril Daniel Edgar Emil Felix Frank Gilbert Gustav Harold Henry Hugo "
    "Ivan Jasper Jonas Julian Kurt Leonard Lewis Martin Matthias Nicholas Oscar Otto Percy Ralph Robert Rupert Samuel "
    "Stefan Theodore Tobias Victor Walter Wilfred"
).split()
_SURNAMES = (
    "Abbott Aldridge Ambrose Appleby Ashdown Barlow Bassett Beaumont Bellamy Birch Blackwood Bolton Brandt Brewster "
    "Calloway Carver Chandler Clayton Cobb Colby Corbett Crane Crosby Dalton Darnell Denham Doyle Draper Drummond "
    "Easton Ellery Fairfax Farrow Fenwick Finch Fletcher Forsyth Frost Garland Gifford Goddard Grady Granger Haddon "
    "Halloran Hargrove Harker Hartwell Hathaway Hensley Hewitt Holloway Hooper Horner Hurst Ingram Jarvis Jessop "
    "Keating Kendrick Kirby Lambert Langdon Latimer Lockwood Lovell Maddox Marlow Massey Mercer Merrill Milburn Monk "
    "Nash Norwood Oakes Osborne Paget Parrish Pemberton Pickering Piper Prescott Quincy Radcliffe Ramsey Redfern "
    "Ridley Rowland Sadler Sanders Saxon Selby Shelton Sinclair Slater Spencer Stokes Sutcliffe Talbot Thatcher "
    "Thornton Tilney Tremaine Tucker Underwood Vance Vernon Wainwright Waverly Webster Wetherby Whitlock Wilder "
    "Winslow Wyatt Yardley Yates York"
).split()
_TOWN_HEADS = (
    "Ash Bram Calder Dun Elm Fern Gar Hal Ister Kel Lang Mar Nor Oak Pen Quill Rav Sel Thorn Ulver Wex Yar Stan Hol "
    "Col Brack"
).split()
_TOWN_TAILS = "bury ford wick mere ton holm stead combe dale port field haven leigh worth gate".split()
_RIVERS = (
    "Aldern Bourne Cray Dovel Eskle Farrin Glaise Hesper Idle Jurra Kenning Lorne Meddle Nairn Orrin Pellow Quenby "
    "Rothe Sallow Tarn Umber Vael Wistow Yarrow Zell Ambry Corve Linnet Marrow Teal"
).split()
_REGIONS = (
    "Upper Vale;the Salt Coast;Northmark;the Lower Fens;Westerlund;the Copper Hills;Estmoor;the Lake District of Orm;"
    "the Three Ridings;Southsand;the Heather Plateau;Inner Galloway Reach"
).split(";")
_COMPANY_TAILS = "Brothers;and Sons;Works;and Company;Limited;Trading House;Manufacturing".split(";")
_SCHOOL_TAILS = "Technical School;Academy;College;Institute;Grammar School;School of Arts".split(";")
_TITLE_HEADS = (
    "The Winter;The Silent;The Copper;The Last;The Hollow;The Distant;The Paper;The Crooked;The Blue;The Patient;"
    "The Broken;The Second"
).split(";")
_TITLE_TAILS = (
    "Orchard;Lantern;Ferry;Staircase;Harvest;Mirror;Island;Garden;Telegram;Shepherd;Bell;Archive;Window;Compass"
).split(";")
_SHIPS = (
    "Morning Heron;Grey Dolphin;Lady Clementine;North Wind;Albion Star;Silver Petrel;Good Intent;Harbour Queen;Sea "
    "Lark;Evening Tide;Brave Eleanor;Golden Plover;Saint Aubrey;Western Light;Black Swan;Merry Widow;Iron Duchess;"
    "Swift Otter;Constance;Halcyon;Ocean Thistle;Pride of Lorne;Red Gannet;Wandering Star"
).split(";")
_APPLES = (
    "Lantern Pippin;Copperskin;Bishop's Blush;October Gem;Harvest Russet;Widow's Choice;Frostbell;Golden Beacon;"
    "Miller's Pride;Sweet Verity;Crimson Latch;Old Sexton;Maiden Rose;Snowdrop Keeper;Autumn Drummer;Velvet Knight"
).split(";")


@dataclass(frozen=True)
class Person:
    """A name with its pronouns."""

    first: str
    last: str
    woman: bool

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"

    @property
    def slots(self) -> dict[str, str]:
        """Template slots of this person."""
        pronouns = ("she", "her", "her") if self.woman else ("he", "him", "his")
        return {
            "name": self.name,
            "first": self.first,
            "last": self.last,
            **dict(zip(("he", "him", "his"), pronouns, strict=True)),
        }


class World:
    """Bags of names for one record."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self._women = Bag(draw, _WOMEN, again=True)
        self._men = Bag(draw, _MEN, again=True)
        self._surnames = Bag(draw, _SURNAMES)
        self._towns = Bag(draw, [head + tail for head in _TOWN_HEADS for tail in _TOWN_TAILS])
        self._rivers = Bag(draw, _RIVERS)
        self._titles = Bag(draw, [f"{head} {tail}" for head in _TITLE_HEADS for tail in _TITLE_TAILS])
        self._ships = Bag(draw, _SHIPS)
        self._apples = Bag(draw, _APPLES)
        self._years = Bag(draw, range(1821, 1921))
        self._film_years = Bag(draw, range(1921, 1979))
        self._numbers = Bag(draw, [n for n in range(1104, 9899) if n % 10 and n % 100 != n // 100])

    def person(self, woman: bool | None = None, last: str | None = None) -> Person:
        woman = bool(self.draw.below(2)) if woman is None else woman
        first = (self._women if woman else self._men).take()
        return Person(first, last or self._surnames.take(), woman)

    def surname(self) -> str:
        return self._surnames.take()

    def town(self) -> str:
        return self._towns.take()

    def river(self) -> str:
        return self._rivers.take()

    def region(self) -> str:
        return self.draw.pick(_REGIONS)

    def company(self) -> str:
        return f"{self._surnames.take()} {self.draw.pick(_COMPANY_TAILS)}"

    def school(self) -> str:
        return f"{self.town()} {self.draw.pick(_SCHOOL_TAILS)}"

    def title(self) -> str:
        return self._titles.take()

    def ship(self) -> str:
        return self._ships.take()

    def apple(self) -> str:
        return self._apples.take()

    def year(self) -> int:
        return self._years.take()

    def film_year(self) -> int:
        return self._film_years.take()

    def shipyard(self) -> str:
        return f"{self._surnames.take()} Shipyard"

    def number(self) -> str:
        """A number of four digits with a comma, different from all others of this world."""
        return f"{self._numbers.take():,}"
