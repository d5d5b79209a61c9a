"""Sentence templates of the entries about works: novels, films, bridges and museums (see `entry_texts`)."""

from __future__ import annotations

WORK_TEXTS: dict[str, dict] = {
    "novel": {
        "core": (
            "[{title} is a novel by {author}.|{title} is a novel written by {author}.|The novel {title} is the work of "
            "{author}.]",
            "[It was published in {year}|It appeared in {year}[ after long delays|]|Readers first saw it in {year}].",
            "[The action takes place in {setting}|Its scenes are laid in {setting}|The setting is {setting}].",
            "[It tells of {plot}|The plot follows {plot}|At its heart stands {plot}].",
        ),
        "extra": (
            "[The first printing sold out within weeks|Few copies were sold at first|A cheap edition made it popular].",
            "[Reviewers praised the dialogue and disliked the ending|One reviewer called it a map of grief|A bishop "
            "preached against the third chapter].",
            "[The manuscript has two different endings|A lost chapter was found in a hatbox|The title was the "
            "printer's idea].",
            "[It has been adapted for the stage twice|A radio version ran for a winter|It was turned into a ballet].",
            "[Schools used it for decades|It is often set for examinations|It is now mostly read by specialists].",
        ),
        "questions": (
            ("Who wrote the novel {title}?", "author"),
            ("In which town is the novel {title} set?", "setting"),
            ("When was the novel {title} published?", "year"),
        ),
        "abstract": "[The text is about a novel|The passage describes a novel], {title} by {author}, which is set in "
        "{setting} and tells of {plot}.",
        "plots": (
            "a widow who opens a lending library",
            "two brothers who inherit one half of a mill each",
            "a postman who reads a letter he should not have opened",
            "a choir that loses its voice",
            "a doctor who cannot leave a quarantined village",
            "a clerk who invents a colleague",
            "a girl who keeps a lighthouse in secret",
            "a trial over a stolen cow",
        ),
    },
    "film": {
        "core": (
            "[{title} is a film directed by {director}.|{title} is a film by the director {director}.|The film "
            "{title} was directed by {director}.]",
            "[It was released in {year}|It came to the cinemas in {year}|Audiences saw it first in {year}].",
            "[The leading part is played by {star}|{star} plays the lead|The lead went to {star}].",
            "[It was shot in {setting}|Filming took place in {setting}|Nearly all of it was filmed in {setting}].",
            "[The story is that of {plot}|It is about {plot}|We follow {plot}].",
        ),
        "extra": (
            "[The music was recorded in a swimming bath|The score uses nothing but a cello|Most songs were cut before "
            "the release].",
            "[Rain ruined the first week of work|The budget was spent after half of the scenes|The crew had to build "
            "their own crane].",
            "[It won a prize for its camera work|It received a prize for the best costume|It went home without a "
            "prize].",
            "[A restored copy was shown recently|Only one complete print survives|The last reel is lost].",
            "[Cinemas in the capital refused it|It ran for a year in one small cinema|It was a hit with farmers].",
        ),
        "questions": (
            ("Who directed the film {title}?", "director"),
            ("Who plays the lead in the film {title}?", "star"),
            ("Where was the film {title} shot?", "setting"),
        ),
        "abstract": "[The text is about a film|The passage describes a film], {title} by {director} with {star} in the "
        "lead, shot in {setting}, about {plot}.",
        "plots": (
            "a tram driver who finds a suitcase",
            "three sisters who run a failing hotel",
            "a retired boxer who learns to dance",
            "a village that hides a deserter",
            "a pianist who loses a bet",
            "a baker who is taken for a spy",
            "a night on a snowbound train",
            "a forger who falls ill",
        ),
    },
    "bridge": {
        "core": (
            "[{title} is a {material} bridge in {place}.|{title} is a bridge of {material} at {place}.|The {material} "
            "bridge called {title} is found in {place}.]",
            "[It was designed by {designer}|Its designer was {designer}|The plans were drawn by {designer}].",
            "[It was opened in {year}|Traffic first crossed it in {year}|The opening took place in {year}].",
            "[It is {metres} metres long|Its length is {metres} metres|From end to end it measures {metres} metres].",
        ),
        "extra": (
            "[A toll was charged until the loan was paid|The toll house is now a tea room|Cattle paid half the toll].",
            "[The foundations went deeper than planned|Work stopped twice because of ice|Divers had to clear a wreck "
            "first].",
            "[Lorries are no longer allowed|Trams used it for a time|Cyclists have a lane of their own].",
            "[Its lamps are lit on holidays only|Swallows nest under the arches|Painters need three summers to go over "
            "it].",
            "[Engineers still visit it for its joints|It has been copied abroad|A model of it stands in the town "
            "hall].",
        ),
        "questions": (
            ("Who designed {title}?", "designer"),
            ("In which town is {title}?", "place"),
            ("When was {title} opened?", "year"),
        ),
        "abstract": "[The text is about|The passage describes] {title}, a crossing made of {material} in {place} that "
        "{designer} designed and that is {metres} metres long.",
        "materials": ("granite", "steel", "timber", "cast-iron", "concrete", "sandstone", "brick"),
    },
    "museum": {
        "core": (
            "[{title} is a museum of {subject} in {place}.|{title} in {place} is devoted to {subject}.|The collection "
            "of {title}, in {place}, is about {subject}.]",
            "[The building was designed by {architect}|{architect} was the architect|It was built to the plans of "
            "{architect}].",
            "[It opened its doors in {year}|It has been open since {year}|The first visitors came in {year}].",
            "[Its pride is {pride}|Most visitors come to see {pride}|The best known piece is {pride}].",
        ),
        "extra": (
            "[Entrance is free on Wednesdays|Children pay nothing|Tickets are sold in the bakery next door].",
            "[A burglary in the early years was never cleared up|A water pipe burst over the east room|Part of the "
            "collection was hidden in a mine].",
            "[The reading room may be used by anyone|The workshop repairs objects for other houses|Guided tours last "
            "an hour].",
            "[The roof garden is open in summer|The cellar was once a brewery|The staircase is steep and famous].",
            "[A new wing is planned|Half of the pieces are in store|The labels are written by pupils].",
        ),
        "questions": (
            ("Who was the architect of {title}?", "architect"),
            ("In which town is {title}?", "place"),
            ("When did {title} open?", "year"),
        ),
        "abstract": "[The passage introduces|The text is about] {title} in {place}, a collection about {subject} in a "
        "house by {architect}, whose best known piece is {pride}.",
        "prides": {
            "Clock": "a clock that runs backwards",
            "Weaving": "a loom for seven colours",
            "Mining": "the smallest steam pump in the country",
            "Puppet": "a talking doll with a tin voice",
            "Postal": "a letter that took ninety years to arrive",
            "Map": "a globe without an equator",
            "Radio": "a receiver built into a violin case",
            "Bread": "an oven for a thousand loaves",
        },
    },
}
