"""Text of the news: five events as several papers tell them, with details for the longer ones."""

from __future__ import annotations

EVENTS: tuple[dict, ...] = (
    {
        "articles": (
            "The old footbridge over the {river} at {town} collapsed on {day} night, cutting the town in two. Nobody "
            "was on it at the time. {speaker}, the town engineer, said that ice had loosened one of the piers and "
            "that the bridge had been closed {days} days before, [against the wishes of shopkeepers|to much "
            "grumbling]. Until a new one is built, {number} people who live on the left bank have to go round by the "
            "mill, a detour of {small} minutes.",
            "{town} (Evening Post): A ferry will carry school children across the {river} from next week, after the "
            "fall of the footbridge on {day}. The boat belongs to {witness}, a retired fisherman, who offered it free "
            "of charge. The town council [met in a special session|sat until midnight] and set aside {sum} crowns for "
            "a new bridge of steel.",
        ),
        "summary": "The footbridge over the {river} at {town} collapsed on {day} night after ice loosened a pier; "
        "nobody was hurt, since town engineer {speaker} had closed it {days} days earlier. Some {number} people on "
        "the left bank face a detour of {small} minutes. A ferry lent by {witness} will carry school children, and "
        "the council has set aside {sum} crowns for a steel bridge.",
    },
    {
        "articles": (
            "Workers of {firm} in {town} went on strike on {day} over plans to end the night canteen. About {number} "
            "of them left their places [at noon|when the whistle blew], according to the union. {speaker}, who speaks "
            'for the strikers, said: "We can live with a small wage, but not on cold soup."',
            "The management of {firm} has called the strike in {town} unreasonable. Director {witness} told the "
            "Herald that the canteen loses {sum} crowns a year and that only {small} meals are served on an average "
            "night. [Talks are planned|The two sides will meet] in {days} days.",
        ),
        "summary": "About {number} workers of {firm} in {town} went on strike on {day} because the night canteen is to "
        "close. Union speaker {speaker} defends the warm meals, while director {witness} says that the canteen loses "
        "{sum} crowns a year with {small} meals a night. Talks are planned in {days} days.",
    },
    {
        "articles": (
            "Builders who were digging a cellar in {town} have found a hoard of {number} silver coins. The find was "
            "made on {day} by an apprentice, {witness}, [whose spade struck a pot|who at first took the pot for a "
            "drain]. Work has stopped, and the place is guarded by two policemen and a dog.",
            'The coins of {town} are about six hundred years old, says {speaker} of the regional museum. "They were '
            "buried in a hurry,\" {speaker_last} explained, since a child's shoe lay in the pot as well. Their value "
            "is put at {sum} crowns.",
            "Who owns the silver of {town}? The owner of the ground, {firm}, claims half of it. The law gives finders "
            "{small} percent. A court will hear the case in {days} days, [and the museum has asked for a loan in the "
            "meantime|while the coins stay in a bank].",
        ),
        "summary": "An apprentice, {witness}, found {number} silver coins while digging a cellar in {town} on {day}. "
        "{speaker} of the regional museum dates them to six centuries ago and says that they were buried in a hurry; "
        "they are worth {sum} crowns. The owner of the ground, {firm}, claims half, the law gives finders {small} "
        "percent, and a court will hear the case in {days} days.",
    },
    {
        "articles": (
            "{speaker} is the new mayor of {town}. In the vote on {day} the former teacher won by {small} votes, the "
            "smallest margin in living memory. [Ballots were counted three times|The count was repeated twice]. "
            "Turnout was high: {number} people took part, many of them for the first time.",
            "The loser of the election in {town}, {witness}, congratulated the winner late at night. {witness_last}, "
            "who had governed for {days} years, said that the plan for a new swimming bath had cost too many votes. "
            "The bath would have cost {sum} crowns.",
            "What comes next in {town}? {speaker_last} has promised to stop the swimming bath and to repair the "
            "schools first. The firm {firm}, which holds the contract for the bath, [is thinking of going to "
            "court|has asked for damages]. The new mayor takes office on the first of the month.",
        ),
        "summary": "Former teacher {speaker} was elected mayor of {town} on {day} with a margin of {small} votes and "
        "{number} people voting. {witness}, who had governed for {days} years, blamed the defeat on a swimming bath "
        "planned for {sum} crowns. The new mayor wants to stop it and repair schools first, and the contractor {firm} "
        "may take legal steps.",
    },
    {
        "articles": (
            "A fire has destroyed the rope factory in {town}. It broke out on {day} morning in a drying room and "
            "reached the roof within minutes. All {small} people who were at work got out. {speaker}, chief of the "
            "fire brigade, praised the night watch for [ringing the bell at once|opening the gates].",
            "Smoke from the factory fire in {town} was seen twenty miles away. Firemen pumped water from the {river} "
            'for {days} days. {witness}, who lives across the street, took in nine families: "We cooked in the wash '
            'boiler," said {witness_last}.',
            "The damage in {town} is put at {sum} crowns by the insurers. {number} coils of rope were lost, among "
            "them an order for the navy. The owner, {firm}, [wants to rebuild|has promised to rebuild] in brick and "
            "to keep paying wages until then.",
            "How did the fire of {town} begin? The police speak of an overheated bearing. A report of last year had "
            "warned of dust in the drying room, and the fan that was asked for had been ordered but not delivered. "
            "Nobody has been charged.",
        ),
        "summary": "A fire that began on {day} in a drying room destroyed the rope factory in {town}; all {small} "
        "workers escaped, and fire chief {speaker} praised the night watch. Water was pumped from the {river} for "
        "{days} days, and {witness} took in nine families. The damage is {sum} crowns, with {number} coils of rope "
        "lost. Owner {firm} will rebuild in brick and go on paying wages. Police suspect an overheated bearing; a "
        "report had warned of dust.",
    },
)

# further paragraphs; none of them belongs into a summary
DETAILS = (
    "It is not the first time that the town makes the news. Years ago a balloon came down on the market hall, and "
    "before that a circus elephant broke into the pharmacy. {name}, who keeps the town chronicle, has written it all "
    "down in green ink.",
    "The weather did not help. A cold wind blew from the hills for most of the week, and the road to {place} was "
    "closed for lorries. Bread was delivered by sledge. The forecast is for thaw and rain, [which nobody looks "
    "forward to|followed by frost].",
    "In {place}, where something similar happened, it took years to settle the costs. The mayor there, {name}, "
    "advises patience and a good lawyer. The two towns have been partners since the war and play each other at "
    "skittles every summer.",
    "Visitors have begun to arrive. The railway ran two extra trains on Sunday, and the inn by the station served "
    "three hundred portions of dumplings. {name}, who works there, has never seen anything like it. [The gulls came "
    "too|Prices have gone up].",
    "The newspaper's archive holds a drawing of the place from the time of the first railway. It shows cows, a well, "
    "and a man asleep under a tree. According to {name}, who teaches history in {place}, the tree is still there.",
    "Traffic was diverted through the gardens, and the brass band had to cancel its concert. Tickets will be "
    "refunded. The band's leader, {name}, hopes to play in {place} instead, provided that somebody lends them a lorry "
    "for the tubas.",
    "A fund has been opened at the savings bank. By the end of the week gifts had come in from as far away as "
    "{place}, among them a jar of small coins from a school class. {name} keeps the list of donors and answers each "
    "of them by hand.",
    "Reporters were allowed to see the place for half an hour. There is little to see: a rope, a lantern, some planks "
    "and a good deal of mud. A hen walked across it all. {name}, of the police in {place}, asked everyone to watch "
    "their step.",
    "The regional parliament will talk about the matter in its next session. A member for {place}, {name}, has put "
    "eleven questions to the government. They concern money, money again, and the state of the roads. An answer is "
    "expected in spring.",
    "Old people in the town recall harder times. {name}, aged ninety-four, remembers a winter when wolves were heard "
    'from the church tower. "We sang louder, that was all," said {last}, who was born in {place} and came here by '
    "ox cart.",
)
REACTIONS = (
    '"I heard it on the stairs and thought it was a joke," said {name}, a baker. By breakfast the whole street '
    "knew. The queue in front of the bakery was the longest since the day of the coronation, although few people "
    "bought more than a roll.",
    "Not everyone is worried. {name}, who sells newspapers by the station, points out that people like a change. "
    '"Last year it was the pigeons," said {last}, and sold another copy. The pigeons are still there, only fewer.',
    "The priest mentioned the matter in his sermon and asked for calm. Afterwards a collection was held. {name}, the "
    "organist, played a piece that had been forbidden for being too cheerful, [and nobody complained|and had to play "
    "it again].",
    "Children have been given a day off. Some of them spent it on the hill with a telescope that belongs to {name}, a "
    "dentist, who charged them nothing but made them look at the moon as well. It was full and very clear.",
    "From {place}, letters of support have come in. One of them, signed by {name} on behalf of the choir, offers "
    "forty beds and a cow. The town hall has thanked them for the beds. It is not yet decided what to do about the "
    "cow.",
    "In the taverns there was talk of nothing else. {name}, a carter, had an opinion about each of the persons "
    "involved, and a good part of the guests had an opinion about {last}. Peace was kept by the landlady with the "
    "help of a soup ladle.",
    "The chess club moved its weekly evening forward so that members could attend the meeting. {name}, its president, "
    "said that one had to think three moves ahead in such a case. Asked what the moves were, {last} asked for time.",
    "A painter has already set up an easel on the spot. {name} works in oil and hopes to finish before the snow. The "
    "first sketch hangs in the window of a bookshop in {place}, where it has been sold to an unknown buyer.",
    "Teachers at the grammar school have made it a subject of lessons. In arithmetic the pupils worked out the costs, "
    "in drawing they drew the scene, and in gymnastics, as {name} told us with regret, they acted it out on the "
    "parallel bars.",
    "Shops sold out of candles within a day. {name}, a grocer, drove to {place} for more and came back with lamp oil "
    "and a box of oranges. The oranges were given to the hospital. [The lamp oil was not|The oil went to the night "
    "watch].",
)
