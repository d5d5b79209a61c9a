"""Sentence templates of the encyclopaedia entries (`[a|b]` is a choice, `{slot}` a fact)."""

from __future__ import annotations

from .work_texts import WORK_TEXTS

KNOWN_FOR = {
    "an engineer": ("a self-levelling canal lock", "a quiet ventilation fan", "the first steam tram with a dry boiler"),
    "a novelist": (
        "a cycle of seven novels about millworkers",
        "a long feud with the critics",
        "ghost stories set at sea",
    ),
    "a painter": ("large harbour scenes", "portraits of railway staff", "a fresco of the four seasons"),
    "a botanist": ("a catalogue of marsh orchids", "the study of wind-borne seeds", "a glasshouse for alpine plants"),
    "a composer": ("an opera without a chorus", "songs for two voices and harp", "a symphony on fishing tunes"),
    "an explorer": (
        "a crossing of the northern ice by sledge",
        "maps of the inland deserts",
        "three winters in a whale hut",
    ),
    "an architect": ("brick theatres with round foyers", "a town hall on stilts", "hospitals full of daylight"),
    "a teacher": ("a reading method with wooden letters", "evening lessons for dockers", "a pocket atlas for pupils"),
    "a chemist": (
        "a dye that does not fade in salt water",
        "a cheap method to clean wells",
        "matches that burn in rain",
    ),
}

ENTRY_TEXTS: dict[str, dict] = {
    **WORK_TEXTS,
    "person": {
        "core": (
            "[{name} was {role}, born in {birthplace} in {born}, who is remembered for {known}.|Born in {birthplace} "
            "in {born}, {name} was {role} whose name is linked with {known}.|{name} ({role}, born {born} in "
            "{birthplace}) [became known|won a name] for {known}.]",
            "[{he} studied at {school}[ with a small grant|, where {he} [shared a room with two cousins|slept above "
            "the stables]|].|{his} education took place at {school}, [which {he} left with honours|which {he} praised "
            "all {his} life].|At {school}, {he} [learned to draw|learned to argue|read everything in the library].]",
            "[In {married}, {last} married {spouse}|{last} and {spouse} were married in {married}][, and they had "
            "[two|three|four|five] children|; the wedding was a quiet one|; they kept a house by the market].",
            "{his} father[ was {father}|, {father}, was [a ropemaker|a village doctor|a stationmaster|a tanner|a piano "
            "tuner|a judge]][, who doubted the career for years|, who taught {him} to row|].",
        ),
        "extra": (
            "[Letters from those years show a patient and stubborn worker|A diary of the time is full of weather and "
            "debts|Friends describe a person who rose before dawn and spoke little].",
            "[A serious illness ended the most productive period|Poor eyesight made the later work slow|After an "
            "accident with a horse, {he} walked with a stick].",
            "[{last} refused a title twice|A title was offered and politely declined|{last} accepted one medal and "
            "gave it to a nephew].",
            "[The papers are kept in eleven boxes|Most of the papers burned in a warehouse fire|The notebooks were "
            "sold at auction] and [have never been printed in full|scholars still quarrel over them|a first edition "
            "is being prepared].",
            "[{he} travelled widely and disliked hotels|{he} hardly ever left the region|{he} kept bees and sold the "
            "honey to neighbours].",
            "[A street was named after {last} many years later|A small plaque marks the house|A school choir bears the "
            "name {last}].",
            "[Critics of the day were divided|Newspapers first made fun of {him}|The public took to the work at "
            "once], [but younger colleagues copied it|and imitators soon appeared|though money remained short].",
        ),
        "questions": (
            ("In which town was {name} born?", "birthplace"),
            ("Where did {name} study?", "school"),
            ("Who was married to {name}?", "spouse"),
        ),
        "abstract": "[The text is about|This is a portrait of|The passage tells of] {name}, {role} from {birthplace} "
        "who [was educated at|went to] {school}, married {spouse} and [is known for|became known for] {known}.",
    },
    "town": {
        "core": (
            "[{title} is a town in {region}.|{title}, in {region}, is a [market town|small town|county town].|The "
            "town of {title} lies in {region}.]",
            "[The River {river} runs through the [old centre|middle of the town]|It stands on both banks of the River "
            "{river}|Its mills were driven by the River {river}].",
            "[At the last count it had {population} inhabitants|The population is {population}|Some {population} "
            "people live there].",
            "[For two centuries most families lived from {trade}|The main trade has long been {trade}|It grew rich "
            "through {trade}].",
            "[Every year visitors come for the {festival}|The best known event is the {festival}|Its calendar is built "
            "around the {festival}].",
        ),
        "extra": (
            "[The railway arrived late and by a detour|A tram line was begun and never finished|The station lies an "
            "hour's walk from the market square].",
            "[A fire destroyed the upper quarter|A flood took away the lower street|An earthquake cracked the church "
            "tower] [in the days of the great-grandparents|long ago], [and the rebuilt houses are all of one "
            "height|and the damage can still be seen|after which a watch was founded].",
            "[The council meets in a former granary|The town hall has a clock with a single hand|The old gaol now "
            "serves as a library].",
            "[Three walking paths start at the well|A path along the old wall is popular with walkers|The hills around "
            "are good for skiing].",
            "[Its football club plays in green and white|The brass band has won many contests|The local newspaper "
            "appears twice a week].",
            "[Winters are mild and very wet|Summers are short and bright|Fog is common until noon].",
        ),
        "questions": (
            ("Which river runs through {title}?", "river"),
            ("How many inhabitants does {title} have?", "population"),
            ("In which region does {title} lie?", "region"),
        ),
        "abstract": "[The text describes|The passage introduces|This is about] {title}, a town on the River {river} "
        "with {population} inhabitants that lived from {trade} and holds the {festival}.",
        "trades": (
            "salt",
            "rope making",
            "woollen cloth",
            "slate",
            "herring",
            "glass beads",
            "paper",
            "barrels",
            "hops",
            "wax",
        ),
        "festivals": (
            "Lantern Fair",
            "Goose Race",
            "Kite Week",
            "Bell Night",
            "Pancake Regatta",
            "Onion Market",
            "Fiddlers' Meeting",
            "Rose Parade",
            "Plough Monday Games",
        ),
    },
    "company": {
        "core": (
            "[{title} is a firm that makes {product}.|{title} makes {product}.|{product} are the main trade of the "
            "firm {title}.]",
            "[It was founded by {founder} in {year}|The founder, {founder}, opened the first workshop in {year}|In "
            "{year} {founder} set up the business].",
            "[Its head office is in {seat}|It has its seat in {seat}|The main works stand in {seat}].",
            "[At its largest it employed {staff} people|Its staff once numbered {staff}|The payroll reached {staff} "
            "names].",
        ),
        "extra": (
            "[A strike over the length of breaks lasted all summer|A price war with a rival ended in a truce|A patent "
            "quarrel kept the lawyers busy].",
            "[The owners built houses and a bath for the workers|The firm kept its own fire brigade|A canteen was "
            "opened, the first in the county].",
            "[Exports went mostly overland|Half of the goods were sold abroad|The catalogue was printed in four "
            "languages].",
            "[The old chimney is a listed monument|The first machine is shown in the entrance hall|The trade mark "
            "shows a hare over a wheel].",
            "[Apprentices had to make their own tools|Apprentices were examined every spring|Training lasted four "
            "years].",
            "[After a bad decade the firm was bought by its employees|A cousin took over and modernised the works|The "
            "shares were sold to a savings bank].",
        ),
        "questions": (
            ("Who founded {title}?", "founder"),
            ("In which town is the head office of {title}?", "seat"),
            ("In which year was {title} founded?", "year"),
        ),
        "abstract": "[The text deals with|The passage is about] {title}, a maker of {product} in {seat} that {founder} "
        "founded and that had {staff} employees at most.",
        "products": (
            "ships and dredgers",
            "brass barometers",
            "railway signals",
            "bicycle bells",
            "printing ink",
            "window glass",
            "weighing scales",
            "tin toys",
            "pumps for mines",
            "stoves",
        ),
    },
    "school": {
        "core": (
            "[{title} is a school in {place}.|{title} is one of the schools of {place}.|{title} stands [on a hill "
            "above|in the west of] {place}.]",
            "[It was founded in {year}|Lessons began in {year}|Its charter dates from {year}].",
            "[{principal} was the first to lead it|The first principal was {principal}|It was led at first by "
            "{principal}].",
            "[Pupils wear {colour} scarves|Its flag is {colour}|The gates and benches are painted {colour}].",
        ),
        "extra": (
            "[The library holds a collection of star maps|The workshop has a forge that is still in use|The laboratory "
            "was paid for by former pupils].",
            "[Fees were low, and many children of farmers came|Half of the places were free|Entrance was by a drawing "
            "test].",
            "[Girls were admitted long before other schools did so|Evening classes were added for adults|A boarding "
            "house was built across the road].",
            "[During the war it served as a hospital|For two years it had to share a barn|A storm took off the roof in "
            "the first winter].",
            "[Rowing is the main sport|Its chess team is feared|The yearly play is given in the courtyard].",
        ),
        "questions": (
            ("In which town is {title}?", "place"),
            ("When was {title} founded?", "year"),
            ("Who was the first principal of {title}?", "principal"),
        ),
        "abstract": "[The passage presents|The text is about] {title}, a school in {place} [first led by|whose first "
        "principal was] {principal}, with {colour} as its colour.",
        "colours": (
            "dark green",
            "pale blue",
            "yellow",
            "crimson",
            "grey and white",
            "orange",
            "violet",
            "black and gold",
        ),
    },
    "ship": {
        "core": (
            "[The {title} was a {kind}.|The {kind} {title} sailed for four decades.|{title} was the name of a {kind}.]",
            "[She was built by {builder}|Her builder was {builder}|She came from the yard of {builder}].",
            "[She was launched in {year}|The launch took place in {year}|She first touched water in {year}].",
            "[Her first captain was {captain}|{captain} was her first captain|Command went first to {captain}].",
            "[Her home port was {port}|She was registered in {port}|She carried the name of {port} on her stern].",
        ),
        "extra": (
            "[She carried timber out and oranges home|Her holds were made for grain|Mail and a few passengers were her "
            "living].",
            "[Twice she ran aground without damage|A fire in the galley nearly ended her days|She lost a mast in her "
            "first gale].",
            "[Sailors thought her lucky|Her crew called her the old cow|She was slow but dry].",
            "[She ended as a floating restaurant|She was broken up on a beach|Her wheel hangs in a tavern].",
            "[Her log books fill two shelves|A song about her is still sung|Her bell was given to a school].",
        ),
        "questions": (
            ("Which company built the ship {title}?", "builder"),
            ("Who was the first captain of the ship {title}?", "captain"),
            ("What was the home port of the ship {title}?", "port"),
        ),
        "abstract": "[The text tells the story of|The passage is about] the {title}, a {kind} built by {builder} for "
        "the port of {port}, with {captain} in command at first.",
        "kinds": (
            "steamer",
            "three-masted barque",
            "coastal schooner",
            "paddle steamer",
            "cargo ketch",
            "whaling ship",
        ),
    },
    "apple": {
        "core": (
            "[{title} is a variety of apple.|The {title} is an apple.|{title} is an old apple variety.]",
            "[It was bred by {breeder}|{breeder} raised it from a pip|Its breeder was {breeder}].",
            "[The first tree stood in {place}|It was found first in {place}|It comes from an orchard in {place}].",
            "[It was first sold in {year}|Nurseries have offered it since {year}|It was named in {year}].",
            "[Its flesh tastes of {taste}|People value it for its taste of {taste}|It has a note of {taste}].",
        ),
        "extra": (
            "[The tree bears late but every year|The tree dislikes wet ground|It is grafted on quince].",
            "[The skin is rough and keeps well|The skin bruises easily|The skin is used for tea].",
            "[It is good for cider and poor for cakes|Cooks use it for dumplings|It is eaten raw with cheese].",
            "[It ripens in the second week of October|It must be picked before the first frost|It is at its best in "
            "March].",
            "[It was almost lost when orchards were cleared|A society looks after the last trees|It can be found in "
            "two nurseries only].",
        ),
        "questions": (
            ("Who bred the apple {title}?", "breeder"),
            ("In which town did the first {title} tree stand?", "place"),
        ),
        "abstract": "[The passage is about|The text describes] an apple called {title} from {place}, bred by "
        "{breeder}, with a taste of {taste}.",
        "tastes": (
            "pineapple",
            "fresh walnuts",
            "aniseed",
            "roses",
            "lemon peel",
            "honey",
            "pears",
            "cloves",
            "hazelnut",
        ),
    },
}
