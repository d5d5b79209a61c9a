"""Text of the few-shot sets: question classes and chats with their summaries."""

from __future__ import annotations

FILLERS = (
    "a lighthouse;a church organ;a paper mill;a ferry;a violin;a beehive;a printing press;a compass;a windmill;a "
    "canal boat;a greenhouse;a steam engine;a wedding cake;a telescope;a wooden bridge;a kite;a rain barrel;a pair of "
    "boots;a tram;a clock"
).split(";")

# one question mark word per class would be too easy: most classes are asked for in several ways
CLASSES: dict[str, tuple[str, ...]] = {
    "Person": (
        "Who designed the town hall of {town} ?",
        "What is the name of the founder of {firm} ?",
        "Who was the first to cross the marshes near {town} on skis ?",
        "Which painter worked for {who} ?",
        "Who taught {who} to build {thing} ?",
        "Name the mayor of {town} .",
        "Who invented {thing} without moving parts ?",
        "Which composer lived in {town} ?",
    ),
    "Town or region": (
        "Where was {who} born ?",
        "In which town does {firm} have its works ?",
        "Where can one see {thing} made of glass ?",
        "Which county lies north of {town} ?",
        "What town has the oldest {firm} branch ?",
        "Where did {who} spend the winter ?",
        "Which town is famous for {thing} on its coat of arms ?",
    ),
    "Point in time": (
        "When was {firm} founded ?",
        "In which year did the harbour of {town} freeze ?",
        "When did {who} finish {thing} ?",
        "What year saw the first flight over {town} ?",
        "On which day does the fair of {town} begin ?",
        "When was the last wolf seen near {town} ?",
        "In what month did {who} leave {firm} ?",
    ),
    "Sum of money": (
        "How much does {thing} cost in {town} ?",
        "What did {who} pay for {thing} ?",
        "What is the fare from {town} to the coast ?",
        "How much did {firm} earn in its first year ?",
        "What was the price of bread in {town} after the flood ?",
        "How much is the fine for {thing} without a licence ?",
        "What salary did {who} get at {firm} ?",
    ),
    "Count of things": (
        "How many bridges does {town} have ?",
        "How many people work for {firm} ?",
        "How many wheels are needed for {thing} ?",
        "How many children did {who} have ?",
        "What is the number of steps in the tower of {town} ?",
        "How many letters did {who} write to {firm} ?",
        "How many screws hold {thing} together ?",
    ),
    "Cause of something": (
        "Why did {firm} close its branch in {town} ?",
        "What made {who} give up painting ?",
        "Why does {thing} need oil ?",
        "What caused the fire in {town} ?",
        "Why is {town} called the city of crows ?",
        "What led {who} to leave {firm} ?",
        "Why must {thing} be kept dry ?",
    ),
    "Way of doing something": (
        "How do you repair {thing} ?",
        "How can one get from {town} to the island in winter ?",
        "How did {who} learn four languages ?",
        "What is the best way to clean {thing} ?",
        "How does {firm} dry its paper ?",
        "How should {thing} be carried upstairs ?",
        "In what manner are guests welcomed in {town} ?",
    ),
    "Plant or animal": (
        "What bird nests in the tower of {town} ?",
        "Which tree gives the wood for {thing} ?",
        "What beast is on the sign of {firm} ?",
        "Which flower did {who} grow in the cellar ?",
        "What kind of horse pulled {thing} ?",
        "Which fish is caught at {town} in March ?",
        "What pet did {who} take to work at {firm} ?",
    ),
    "Meaning of a word": (
        "What does the name {town} mean ?",
        "What is meant by a dry lock ?",
        "What do workers of {firm} mean by a blue Monday ?",
        "What does {who} call a paper moon ?",
        "What is the meaning of the motto of {town} ?",
        "What is a hobnail in the trade of {firm} ?",
        "What does it mean to ride {thing} backwards ?",
    ),
    "Dish or drink": (
        "What do people in {town} eat on New Year's Eve ?",
        "Which soup did {who} cook for the crew ?",
        "What is served in the canteen of {firm} on Fridays ?",
        "What drink is made from quinces in {town} ?",
        "Which cake has the shape of {thing} ?",
        "What did {who} have for breakfast ?",
        "Which cheese is made by {firm} ?",
    ),
}

# (turns, summary, choices)
Dialogue = tuple[str, str, dict[str, tuple[str, ...]]]
DIALOGUES: tuple[Dialogue, ...] = (
    (
        "{a}: [hi {b}, are you up?|{b}? you there?]\n{b}: [barely|yes, why]\n{a}: I left my {x} at your place\n{b}: "
        "the {y} one? it's on the [shelf|kitchen table]\n{a}: phew! can I pick it up {t}?\n{b}: sure, but not before "
        "six\n{a}: [great, thanks|you are an angel]",
        "{a} left {his} {x} at {b}'s place and will pick it up {t} after six.",
        {
            "x": ("umbrella", "scarf", "camera", "notebook"),
            "y": ("red", "old", "striped"),
            "t": ("tonight", "tomorrow", "on Sunday"),
        },
    ),
    (
        "{a}: the train is late [again|once more]\n{b}: how late?\n{a}: {n} minutes, they say there is a {x} on the "
        "line\n{b}: [seriously?|you are joking]\n{a}: I wish. start without me\n{b}: no no, we wait. {c} hasn't come "
        "either\n{a}: [ok, order me a soup then|fine, then get me a soup]",
        "{a}'s train is {n} minutes late because of a {x} on the line. {b} will wait and order a soup.",
        {"n": ("25", "40", "55"), "x": ("cow", "fallen tree", "broken lorry")},
    ),
    (
        "{a}: it's {c}'s birthday soon, what do we get?\n{b}: [no idea|hmm], a book?\n{a}: {c} never reads\n{b}: then "
        "{x}?\n{a}: [oh yes!|that's it!] how much is that?\n{b}: about {n} euros, we could share\n{a}: deal, will you "
        "buy it?\n{b}: yes, on {d}",
        "{a} and {b} will give {c} {x} and share the price of about {n} euros. {b} will buy it on {d}.",
        {
            "x": ("a pair of skates", "a hammock", "a chess clock"),
            "n": ("30", "45", "60"),
            "d": ("Monday", "Thursday", "Saturday"),
        },
    ),
    (
        "{a}: is the flat still free?\n{b}: yes! do you want to see it?\n{a}: [please|I'd love to]. is it loud?\n{b}: "
        "a bit, there is a {x} downstairs\n{a}: I don't mind. how about {d}?\n{b}: at {n}? the number is {m}\n{a}: "
        "[perfect|see you then]",
        "{a} will look at {b}'s flat, which is above a {x}, on {d} at {n}.",
        {
            "x": ("bakery", "pub", "music school"),
            "d": ("Tuesday", "Friday", "Sunday"),
            "n": ("five", "seven"),
            "m": ("12", "31", "44"),
        },
    ),
    (
        "{a}: {b}, the cat has eaten your {x}\n{b}: WHAT\n{a}: I only turned round for a second\n{b}: is she "
        "ok??\n{a}: she looks [very happy|proud of herself]\n{b}: call the vet please, just to be safe\n{a}: done. he "
        "says to give her {y} and wait\n{b}: [poor me|I was so looking forward to it]",
        "The cat has eaten {b}'s {x}. {a} called the vet, who says to give her {y} and wait.",
        {"x": ("salmon", "cheese sandwich", "birthday cake"), "y": ("water", "grass", "nothing else")},
    ),
    (
        "{a}: did you pass??\n{b}: [guess|drum roll]\n{a}: come on!\n{b}: yes! {n} points!\n{a}: congratulations!!! "
        "and the {x} part?\n{b}: that was the worst, I was just lucky\n{a}: let's celebrate {t}\n{b}: [gladly|ok], "
        "but I have to be home by ten\n{a}: we'll go to the {y} then",
        "{b} passed the exam with {n} points. {a} and {b} will celebrate {t} at the {y}.",
        {
            "n": ("71", "84", "93"),
            "x": ("oral", "written"),
            "t": ("tonight", "on Friday"),
            "y": ("pizzeria", "bowling hall", "tea house"),
        },
    ),
    (
        "{a}: who is picking up the children today?\n{b}: I thought you\n{a}: no, I have the {x} at four\n{b}: [oh "
        "dear|hm], then I will leave work early\n{a}: can you? [thank you|that would be great]\n{b}: but you bring "
        "them to {y} tomorrow\n{a}: promised",
        "{b} will pick up the children today because {a} has the {x}. {a} will bring them to {y} tomorrow.",
        {"x": ("dentist", "interview", "driving lesson"), "y": ("swimming", "school", "the museum")},
    ),
    (
        "{a}: do you still have that {x}?\n{b}: [yes|somewhere], why?\n{a}: I want to {y}\n{b}: you? alone?\n{a}: "
        "with {c}, who has done it before\n{b}: [good luck|that calms me]. come by, it's in the cellar\n{a}: I'll "
        "bring it back {t}\n{b}: cleaned!\n{a}: cleaned",
        "{a} will borrow {b}'s {x} to {y} with {c} and bring it back {t}.",
        {
            "x": ("ladder", "drill", "saw"),
            "y": ("paint the ceiling", "build a shelf", "mend the roof"),
            "t": ("on Monday", "next week"),
        },
    ),
    (
        "{a}: I can't come to the rehearsal\n{b}: not again :( what is it?\n{a}: {x}\n{b}: [ouch|oh no]. since "
        "when?\n{a}: since {d}, and the doctor says to rest\n{b}: then {c} has to play your part\n{a}: I'll send the "
        "notes\n{b}: get well soon!",
        "{a} can't come to the rehearsal because of {x}. {c} will play {his} part, and {a} will send the notes.",
        {"x": ("a bad back", "a cold", "a swollen thumb"), "d": ("yesterday", "Sunday", "last night")},
    ),
    (
        "{a}: where did you get those {x}?\n{b}: at the market in {town}\n{a}: expensive?\n{b}: {n} euros for a whole "
        "bag\n{a}: I'd like some too, for {y}\n{b}: I'm going again on {d}, shall I bring you a bag?\n{a}: [two "
        "please|make it two]!\n{b}: ok, two",
        "{b} bought {x} at the market in {town} and will bring {a} two bags on {d}.",
        {
            "x": ("cherries", "walnuts", "mushrooms"),
            "n": ("3", "5", "8"),
            "y": ("jam", "a cake"),
            "d": ("Wednesday", "Saturday"),
        },
    ),
    (
        "{a}: the washing machine is making that sound again\n{b}: the {x} sound?\n{a}: worse\n{b}: turn it "
        "off!!\n{a}: I did, now there is water [everywhere|on the floor]\n{b}: put towels down, I'm calling {c}\n{a}: "
        "isn't {c} on holiday?\n{b}: back since {d}. be there in {n} minutes",
        "The washing machine is leaking. {b} is calling {c}, who has been back since {d}, and will be there in {n} "
        "minutes.",
        {"x": ("grinding", "howling", "knocking"), "d": ("Monday", "yesterday"), "n": ("ten", "twenty")},
    ),
    (
        "{a}: have you read the {x}?\n{b}: which one?\n{a}: the one I lent you in {m}!\n{b}: [oops|oh, that one]. "
        "only half of it\n{a}: and?\n{b}: I like the {y}, but it's so long\n{a}: keep it, but {c} wants it next\n{b}: "
        "then I'll finish it by {d}",
        "{b} has read half of the {x} that {a} lent out in {m} and will finish it by {d}, since {c} wants it next.",
        {
            "x": ("crime novel", "biography"),
            "m": ("March", "August"),
            "y": ("detective", "beginning", "drawings"),
            "d": ("Easter", "Sunday"),
        },
    ),
    (
        "{a}: are we going {x} or not?\n{b}: have you looked outside?\n{a}: it's only rain\n{b}: it's {y}!\n{a}: "
        "[coward|oh come on]\n{b}: let's go {t} instead, they say it will be sunny\n{a}: ok but then {c} can't "
        "come\n{b}: [pity|next time then]",
        "{a} and {b} will go {x} {t} because of the {y} today. {c} can't come then.",
        {
            "x": ("hiking", "sailing", "cycling"),
            "y": ("hail", "a thunderstorm"),
            "t": ("on Sunday", "tomorrow", "next weekend"),
        },
    ),
    (
        "{a}: I got the job!\n{b}: at the {x}? [wow|brilliant]\n{a}: yes, I start in {m}\n{b}: so you are moving to "
        "{town}?\n{a}: I have to, it's too far by bus\n{b}: I'll miss you on the {y} team\n{a}: I'll come for every "
        "match\n{b}: you'd better",
        "{a} got a job at the {x}, starts in {m} and is moving to {town}, but will come back for the matches of the "
        "{y} team.",
        {"x": ("zoo", "theatre", "harbour office"), "m": ("May", "October"), "y": ("chess", "volleyball", "quiz")},
    ),
    (
        "{a}: somebody has parked in front of my garage\n{b}: what does it look like?\n{a}: a {x} van with {y} on "
        "it\n{b}: [uh oh|erm]. that is {c}'s\n{a}: tell {c} to move it, I have to leave at {n}\n{b}: on the way\n{a}: "
        "thanks, or I'll let the air out ;)",
        "A {x} van blocks {a}'s garage. It is {c}'s, and {b} will see that it is moved before {a} leaves at {n}.",
        {"x": ("white", "green", "rusty"), "y": ("a fish", "flowers", "a piano"), "n": ("eight", "half past nine")},
    ),
    (
        "{a}: how do you make that {x}?\n{b}: easy: {y}, butter, and then two hours in the oven\n{a}: two "
        "HOURS?\n{b}: low heat. that's the secret\n{a}: and salt?\n{b}: [at the end only|never before the end]\n{a}: "
        "I'm trying it {t}, my parents are coming\n{b}: send me a picture",
        "{a} will make {b}'s {x} {t} for {his} parents: {y} and butter, two hours in the oven at low heat, salt at "
        "the end.",
        {"x": ("stew", "gratin", "casserole"), "y": ("potatoes", "leeks", "pumpkin"), "t": ("tonight", "on Sunday")},
    ),
    (
        "{a}: I think I lost my {x}\n{b}: where did you have it last?\n{a}: [on the tram|in the tram], I had it on my "
        "lap\n{b}: which line?\n{a}: {n}, towards {town}\n{b}: call the lost property office, they close at {h}\n{a}: "
        "[good idea|doing it now]\n...\n{a}: they have it!!!\n{b}: see? :)",
        "{a} lost {his} {x} on tram {n}. On {b}'s advice {he} called the lost property office, which has it.",
        {"x": ("hat", "violin", "wallet"), "n": ("4", "9", "13"), "h": ("five", "six")},
    ),
    (
        "{a}: can you water my plants while I'm away?\n{b}: [of course|sure]. how often?\n{a}: every {x} days, but "
        "the {y} only once\n{b}: and the key?\n{a}: with {c} on the second floor\n{b}: when are you back?\n{a}: on "
        "the {n}th\n{b}: [have fun!|enjoy it!]",
        "{b} will water {a}'s plants every {x} days until the {n}th. {c} has the key.",
        {"x": ("two", "three", "four"), "y": ("cactus", "orchid"), "n": ("14", "19", "26")},
    ),
)
