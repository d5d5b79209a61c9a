"""Text of the meetings: topics with their turns, the queries about them and the right answers."""

from __future__ import annotations

OPENING = (
    "Chair: [Good morning, everybody.|Right, shall we begin?] Welcome to the monthly meeting of {firm} in {place}. "
    "You all have the agenda in front of you, and I would like to be done by noon.\nSecretary: [I will take the "
    "minutes, as usual.|My pencil is sharp.]\nChair: Thank you. Last month's minutes were sent round. I have heard no "
    "objections, so they stand."
)

CLOSING = (
    "Chair: [That was the last item.|That brings us to the end of the list.] Any other business?\nSecretary: Only "
    "that somebody has left a hat in the cloakroom.\nChair: Then I close the meeting. [Thank you all, and mind the "
    "wet stairs.|Thank you. The next one is in four weeks.]"
)

# turns without content
SMALL_TALK = (
    "Um, yes.",
    "Mm-hmm.",
    "Could you say that again? The window was open.",
    "Could you say that again? A tram went by.",
    "Sorry, I was looking for my glasses.",
    "Sorry, whose cup is this?",
    "That is more or less what they told me downstairs.",
    "Let me write that down. Yes, go on.",
    "I would not say so, but never mind.",
    "Is there any coffee left? Thank you.",
    "Pass me the biscuits, please.",
    "We said the same thing a year ago, I think.",
    "Hm, I had that the other way round in my notes.",
)

TOPICS: dict[str, dict] = {
    "heating": {
        "choices": {
            "plan": ("a wood boiler", "a gas boiler", "a heat pump"),
            "fear": ("the noise at night", "the dust", "the long pipes"),
        },
        "turns": "Chair: Next, the heating. [It was cold in here all winter|We all kept our coats on]. {a}, you have "
        "looked into it.\n{a}: I have three offers. [The one I like best|My favourite] is {plan}. It would cost us "
        "{n} crowns, and the work takes {weeks} weeks.\n{b}: That is a lot of money. [What about the old boiler|Can "
        "the old boiler not be mended]? It was good enough for my predecessor.\n{a}: It was built before I was born, "
        "and the spare parts are gone. Every repair costs us more than the last one.\n{c}: My worry is {fear}. The "
        "neighbours will be at the door.\n{a}: The maker promises to deal with that. [I can get it in writing|I will "
        "ask for it in writing].\nChair: Then let us decide. We take {plan}, if the {a} gets that promise in writing. "
        "[Agreed?|All in favour?]\n{b}: Agreed, with a heavy heart.\n{c}: Agreed.",
        "queries": (
            (
                "What was decided about the heating and what did the {c} worry about?",
                "The group decided to take {plan}, which costs {n} crowns and takes {weeks} weeks to install, "
                "provided that the maker's promise is given in writing. The {c} was worried about {fear}.",
            ),
        ),
    },
    "logo": {
        "choices": {
            "beast": ("a heron", "a snail", "a fox"),
            "colour": ("dark red", "sea green", "mustard yellow"),
        },
        "turns": "Chair: Now the new sign for the gate. {a}, [show us the drawings|what have you brought us]?\n{a}: "
        "The artist, {who}, has made two. One has just our name. The other one shows {beast} above the name, in "
        "{colour}.\n{b}: [Why on earth {beast}|What has {beast} to do with us]?\n{a}: People remember it. We asked in "
        "the street, and {share} percent could still describe it a day later.\n{c}: I like it. But the colour is hard "
        "to print. [On brown paper it looks like mud|It will look dirty on paper bags].\n{b}: Then make it black, and "
        "the costs go down as well.\nChair: So the picture stays, and the colour goes. Can {who} do that?\n{a}: [In a "
        "week|By next week], I am told. The price is {n} crowns either way.",
        "queries": (
            (
                "Summarise the discussion about the new sign.",
                "{who} made two drawings, one of which shows {beast} in {colour}. It was remembered by {share} "
                "percent of the people asked. Because the colour is hard to print, the picture will be used in black, "
                "at a price of {n} crowns.",
            ),
            (
                "Why did the group give up the colour of the new sign?",
                "The {c} said that {colour} is hard to print and looks dirty on paper, and the {b} pointed out that "
                "black would be cheaper, so the picture of {beast} stays and the colour goes.",
            ),
        ),
    },
    "summer": {
        "choices": {
            "goal": ("the salt caves", "the island", "the old monastery"),
            "means": ("by steamer", "by train", "in two buses"),
        },
        "turns": "Chair: The summer outing. [Last year's rain is forgiven|Let us hope for better weather]. {a}, you "
        "have a proposal.\n{a}: I propose {goal}, and we would go {means}. I have written to them. They can take us "
        "on the second Saturday in July.\n{b}: How much is it for each person?\n{a}: With lunch, about what we paid "
        "last time. The firm's share would be {n} crowns.\n{c}: Some people get sick when they travel like that. [I "
        "am one of them|My whole department, in fact].\n{a}: Then they may come by bicycle. It is {weeks} "
        "miles.\n{b}: [And the families|May we bring children]?\n{a}: One guest each. More will not fit at the "
        "tables.\nChair: Good. We go to {goal}, one guest each, and the {a} orders the tickets before the end of the "
        "month.",
        "queries": (
            (
                "What was agreed on the summer outing?",
                "They will go to {goal} {means} on the second Saturday in July, with one guest each. The firm pays "
                "{n} crowns, and the {a} orders the tickets before the end of the month. Those who get sick may come "
                "by bicycle.",
            ),
        ),
    },
    "visitors": {
        "choices": {
            "limit": ("groups of eight", "groups of ten", "groups of twelve"),
            "harm": ("a lens was broken", "the dog bit someone", "a gauge was stolen"),
        },
        "turns": "Chair: Visitors in the workshop. There was an incident. {a}?\n{a}: Yes. On Friday {harm}. There were "
        "{share} people in the room, [and one of me|and nobody to watch them].\n{b}: But visitors bring money. We "
        "sold {n} tickets this year. [I cannot do without that|The budget depends on it].\n{a}: I do not want to "
        "close the doors. I want {limit}, and a rope in front of the machines.\n{c}: And a guide. {who} has asked me "
        "for work, knows the place, and speaks four languages.\n{b}: A guide costs money too.\n{c}: [Sell picture "
        "cards, and it pays for itself|Raise the ticket by a penny and you have it].\nChair: Let us try it for "
        "{weeks} weeks: {limit}, the rope, and {who} as a guide. Then we look at the figures.",
        "queries": (
            (
                "What did the {a} want to change about visits to the workshop?",
                "After an incident in which {harm} while {share} people were in the room, the {a} wanted {limit} and "
                "a rope in front of the machines, but did not want to close the doors.",
            ),
            (
                "Summarise the discussion about visitors in the workshop.",
                "After an incident in which {harm}, the {a} asked for {limit} and a rope, while the {b} pointed to "
                "the {n} tickets sold. The {c} proposed {who} as a guide. All this will be tried for {weeks} weeks.",
            ),
        ),
    },
    "van": {
        "choices": {
            "fault": ("the gearbox", "the back axle", "the brakes"),
            "other": ("hire one by the day", "share one with the dairy", "go back to a horse"),
        },
        "turns": "Chair: The delivery van. [I saw it being pushed again|I hear it has broken down again].\n{a}: It is "
        "{fault} this time. The garage wants {n} crowns, and it will take {weeks} weeks because they have to send for "
        "parts.\n{b}: For {m} crowns we get a new one. Well, a nearly new one. [{who} is selling|It belongs to "
        "{who}].\n{c}: Do we need one at all? It stands in the yard four days out of five. We could {other}.\n{a}: "
        "Not in December. In December we could use three of them.\n{b}: [That is true|I have to admit it]. In the "
        "rest of the year it stands still.\nChair: I suggest that we {other} until autumn, and that the {a} finds out "
        "what the van is worth as it stands.\n{c}: [I can live with that|Fine with me].",
        "queries": (
            (
                "What is wrong with the delivery van, and what will be done?",
                "The trouble is {fault}; the garage asks for {n} crowns and {weeks} weeks. Since the van mostly "
                "stands still, they will {other} until autumn, and the {a} will find out what the van is worth.",
            ),
        ),
    },
    "cat": {
        "choices": {
            "room": ("the drawing office", "the archive", "the post room"),
            "food": ("herring", "cream", "liver"),
        },
        "turns": "Chair: I am told that we have a cat.\n{a}: She lives in {room}. [She came in with the coal|She came "
        "in during the storm]. There have been no mice since then.\n{b}: And who pays for the {food}? I found it in "
        "the accounts under repairs.\n{a}: It is cheaper than the traps. We spent {n} crowns on traps last "
        "year.\n{c}: My eyes water as soon as she walks past. [I am serious|It is no joke].\nChair: Then she stays in "
        "{room}, with the door shut during office hours. The {food} goes under cleaning.\n{b}: [As long as it is "
        "written down|Under cleaning, then].",
        "queries": (
            (
                "What was decided about the cat?",
                "She stays in {room} with the door shut, and the {food} is booked under cleaning.",
            ),
        ),
    },
    "hours": {
        "choices": {
            "when": ("at seven", "at half past six", "at nine"),
            "bell": ("the whistle", "the bell", "the siren"),
        },
        "turns": "Chair: Working hours. {a}, you wanted to speak about the morning.\n{a}: People ask whether we could "
        "begin {when}. The new tram does not fit our times. I put up a list, and {share} percent have signed "
        "it.\n{b}: The customers are used to our times. [A closed door is a lost sale|They come when we open].\n{c}: "
        "The shop can keep its hours. It is the workshop that wants the change.\n{a}: We would have to move {bell} as "
        "well. The whole street sets its clocks by it.\n{b}: [That will be fun|Good luck with the baker].\nChair: We "
        "try it in the workshop for {weeks} weeks. the {a} writes to the neighbours about {bell}.",
        "queries": (
            (
                "What was decided about working hours?",
                "The workshop will begin {when} for a trial of {weeks} weeks; the shop stays.",
            ),
        ),
    },
    "roof": {
        "choices": {
            "leak": ("above the stairs", "over the paint store", "next to the chimney"),
            "stuff": ("tar", "lead", "slate"),
        },
        "turns": "Chair: The roof, I am afraid. {a}.\n{a}: It leaks {leak}. We have {weeks} buckets up there, and I "
        "empty them twice a day.\n{b}: Was it not repaired only last spring?\n{a}: With {stuff}, yes, by {who}. [It "
        "held until the first frost|It lasted for one summer]. I would like to have the whole side done properly. "
        "That is {n} crowns.\n{c}: If we wait, the beams will rot, and then we pay double.\n{b}: I can find the half "
        "of it now. [The rest must wait for January|The other half comes in January].\nChair: Then we do the bad half "
        "now. And the {a} writes a sharp letter to {who}.",
        "queries": (
            (
                "What was decided about the roof?",
                "The bad half of the roof is repaired now, and {who} gets a sharp letter.",
            ),
        ),
    },
    "catalogue": {
        "choices": {
            "form": ("a calendar", "a folded sheet", "a small book"),
            "lack": ("prices", "pictures", "an index"),
        },
        "turns": "Chair: The catalogue for next year. [It has to go to the printer soon|The printer is waiting].\n{a}: "
        "I would like to make it {form}. People throw away the big one. Of {n} copies, most never left the "
        "cupboard.\n{b}: It must have {lack}. Last time we did without, and I answered letters until Easter.\n{c}: "
        "What about the text? [Half of it is about the founder's moustache|It reads like a sermon].\n{a}: {who} would "
        "rewrite it for {m} crowns.\n{b}: For that sum I write it myself.\nChair: {who} writes it, the {b} reads it, "
        "and it will be {form}, with {lack}. In {weeks} weeks I want to see a proof.",
        "queries": (("What will the catalogue look like?", "It will be {form} with {lack}, with text by {who}."),),
    },
    "choir": {
        "choices": {
            "song": ("the herring song", "a hymn in Latin", "something by the engineer's aunt"),
            "spot": ("the yard", "the hall"),
        },
        "turns": "Chair: The choir has asked for a piano.\n{a}: {who} would give us one. [It has only to be fetched|We "
        "need six strong people]. It would stand in {spot}.\n{b}: And who tunes it? My brother pays {share} crowns "
        "each time.\n{c}: At the jubilee they sang {song} without any piano, [and people wept|and it took a quarter "
        "of an hour to find the note].\n{a}: That is just my point. They sing every Thursday after work, and there "
        "are {weeks} of them by now.\n{b}: As long as it is after work.\nChair: We say thank you to {who} and take "
        "the piano. Tuning is a matter for the choir.",
        "queries": (
            (
                "What was decided about the piano?",
                "The piano given by {who} is accepted, and the choir pays for tuning.",
            ),
        ),
    },
    "apprentices": {
        "choices": {
            "test": ("a drawing test", "a day in the workshop", "an essay"),
            "bed": ("with families", "in the attic"),
        },
        "turns": "Chair: Apprentices. We had {n} letters last year, which I find hard to believe.\n{a}: It is the "
        "newspaper's doing. [They wrote that we feed people well|That article about our soup]. We have room for "
        "{weeks}.\n{b}: Marks tell me nothing. I should like to have {test}.\n{c}: And where do they sleep? Some come "
        "from far away.\n{a}: We could put them {bed}. {who} is willing to look after them.\n{b}: [Girls too, I "
        "hope|And I want girls among them]. The best one we ever had was a girl.\nChair: Of course. The {b} prepares "
        "{test}, and they will be put up {bed}. Let us have names by June.",
        "queries": (
            (
                "How are apprentices chosen?",
                "They have to pass {test}, which the {b} prepares, and names are due by June.",
            ),
        ),
    },
}
