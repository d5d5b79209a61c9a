"""Text of the stories: openings, episodes and endings with the things that fill them."""

from __future__ import annotations

# things an episode may name; each is used once in a story
_OBJECTS = (
    "a copper whistle;a tin compass;a silver thimble;a green glass bottle;a bone comb;a brass doorknob;a red wool "
    "scarf;a pewter cup;a folding knife;a pair of reading glasses;a wooden flute;a leather purse;a string of amber "
    "beads;a painted fan;an ivory domino;a blue enamel box;a small bronze bell;a walnut music box;an iron candlestick;"
    "a pocket sundial;a horn spoon;a velvet cap;a porcelain button;a brass telescope;a lacquered tray;a crystal "
    "stopper;a carved chess queen;a bundle of quills;a pewter inkwell;a linen map"
).split(";")
_NAMES = (
    "Marigold;Captain;Thunder;Biscuit;Old Solomon;Nettle;Duchess;Pepper;Button;Bramble;Juniper;Mustard;Thimble;"
    "Patience;Clover;Ginger;Sparrow;Domino;Mischief;Velvet;Pilgrim;Treacle;Bishop;Tinker;Hazelnut;Quicksilver;"
    "Buttermilk;Cobweb;Barnacle;Whisper"
).split(";")
_HIDINGS = (
    "inside a hollow loaf;under the third stair;behind the oven;in the church organ;beneath a beehive;in a boot;under "
    "a loose hearthstone;inside the grandfather clock;in the rain barrel;behind a portrait;in a sack of oats;under "
    "the saddle;in a bird's nest;inside a drum;between two roof beams;in the coal scuttle;under the altar cloth;in a "
    "teapot;behind the mill wheel;in a bell tower;under a flowerpot;in a cheese mould;inside a lute;in the well "
    "bucket;under the bridge planks;behind a barrel of herring;in a snuffbox;inside a scarecrow;in a violin case;"
    "under a millstone"
).split(";")
_PLANTS = (
    "willow bark;elderflower;wild thyme;yarrow;feverfew;nettle root;juniper berries;marsh mallow;sage;lime blossom;"
    "horehound;burdock;comfrey;angelica;lemon balm;plantain leaves;wormwood;coltsfoot;valerian;dandelion root;ground "
    "ivy;bog myrtle;hawthorn;mullein;betony;chamomile;meadowsweet;rosehips;fennel seed;sorrel"
).split(";")
_HOUSES = (
    "the Crooked Billet;the Three Herons;the Lamb and Anchor;the Silent Woman;the Plough Inn;the Golden Cask;the "
    "Blind Fox;the Moon and Saddle;the Empty Boot;the Red Otter;the Nine Elms;the Drowsy Miller;the White Hart;the "
    "Broken Oar;the Goose and Gridiron;the Traveller's Rest;the Cat and Kettle;the Two Sextons;the Barley Mow;the "
    "Lost Shilling;the Wheel of Fortune;the Old Ferry House;the Four Winds;the Running Horse;the Black Ram;the "
    "Fiddler's Elbow;the Hungry Monk;the Sailor's Return;the Green Dragon;the Quiet Pigeon"
).split(";")
_BOOKS = (
    "A Treatise on Locks;The Beekeeper's Year;Tides of the Inner Coast;On the Mending of Bells;A Short History of "
    "Salt;The Honest Surveyor;Lives of the Ferrymen;Remarks on Fog;The Complete Glazier;Letters to a Miller;The "
    "Shepherd's Almanac;A Dictionary of Knots;Of Wells and Springs;The Cartwright's Companion;Sermons for Sailors;The "
    "Art of Vinegar;Journeys without a Horse;Wonders of the Marsh;The Gardener's Quarrel;Seven Ways to Bake;A Guide "
    "to Old Roads;The Poor Man's Astronomy;Rules of the Weighhouse;The Pigeon Post;The Cooper's Arithmetic;Songs of "
    "the Slate Men;A Book of Small Debts;The Traveller's Lantern;Notes on Snow;The Widow's Cookery"
).split(";")
_NUMBERS = (
    "thirteen;seventeen;nineteen;twenty-one;twenty-three;twenty-six;twenty-nine;thirty-one;thirty-four;thirty-seven;"
    "thirty-eight;forty-one;forty-three;forty-six;forty-nine;fifty-two;fifty-four;fifty-seven;fifty-nine;sixty-one;"
    "sixty-three;sixty-six;sixty-eight;seventy-one;seventy-three;seventy-six;seventy-nine;eighty-two;eighty-four;"
    "ninety-one"
).split(";")

THINGS = {
    "thing": _OBJECTS,
    "pet": _NAMES,
    "hiding": _HIDINGS,
    "herb": _PLANTS,
    "inn": _HOUSES,
    "book": _BOOKS,
    "count": _NUMBERS,
}

OPENINGS = (
    "{hero_name}, {trade} of {home}, had never been further than the next valley when the letter came. It was written "
    "in a hurried hand and sealed with candle wax, and it said that an aunt in {goal} was dying and wished to see "
    "{him} before the first snow. {hero} read it twice, shut the workshop, and asked {friend} from across the yard to "
    "come along, because {friend} could cook and was not afraid of dogs. They left on a Tuesday with one mule and too "
    "much luggage.",
    "On the evening when the dam above {home} broke, {hero_name}, {trade}, lost a house, a garden and every tool but "
    "one. There was nothing to stay for. A cousin in {goal} had written years before that good hands were always "
    "wanted there, and so {hero} walked out along the ridge at dawn. At the last gate {friend} was waiting with a "
    'bundle and a stubborn face. "You will get lost alone," said {friend}, and that was that.',
    "Nobody in {home} believed that {hero_name} would really go. {hero} was {trade}, content, a little lazy, and "
    "known to be frightened of water. But a wager is a wager. Before the whole tavern {he} had sworn to reach {goal} "
    "on foot before the feast of lamps and to bring back proof, and {friend}, who held the stakes, was to go with "
    "{him} and see that no coach was taken. They set out in drizzle, with half of the town cheering and the other "
    "half laughing.",
    "The year the orchards failed, {hero_name} closed the door of the house in {home} and hung the key on a nail. "
    "{he} was {trade} and had debts. In {goal}, people said, a lawyer was looking for the heirs of a man who had made "
    "a fortune in soap, and the name in the notice was very like {his} own. {friend}, who could read legal hands, "
    "agreed to come for a tenth of whatever there was. They took bread, a lantern and a blanket each.",
    "It began with a bell that would not ring. {hero_name}, {trade}, was the only one in {home} who remembered that "
    "its clapper had been lent to {goal} in a year of war and had never been returned. The council voted two blankets "
    "and a small purse, and {hero} was told to fetch it. {friend} went too, chiefly to get away from a quarrel at "
    "home. The road was dry, the mornings were cold, and for the first hour neither of them spoke.",
)

# name: (text, question, slot of the answer)
EPISODES: dict[str, tuple[str, str, str]] = {
    "ferry": (
        "At {town} the road ended in brown water. The ferry was kept by {other}, and the flat old boat was named "
        "{pet}. [There was no money left for the fare|The fare had doubled since the spring], so after a long silence "
        "{hero} gave the ferry people {thing}, [which was turned over twice and put away in a pocket|which was "
        "accepted with a shrug]. [Halfway across|In midstream] a tree trunk came down and knocked off the rudder. "
        "{friend} paddled with a plank, {hero} bailed with a hat, and they landed a mile below the jetty, wet and "
        "oddly cheerful.",
        "What did {hero} give to pay for the ferry at {town}?",
        "thing",
    ),
    "inn": (
        "They slept that night at {inn}, [a long low house with a smoking chimney|where the beds were short and the "
        "soup was good]. The landlord, {other}, told them how a bishop had once left without paying and how {o_he} "
        "had followed him for {count} miles to get the money back. [Nobody believed it|The guests had heard it "
        "before]. In the morning the mule was found in the kitchen, eating apples out of a basket, and {hero} had to "
        "[sweep the yard|chop wood for an hour] to make up for the loss.",
        "How many miles did the landlord {other} follow the bishop?",
        "count",
    ),
    "library": (
        "In {town} there was a library above a fish shop, and its keeper, {other}, was so pleased to have visitors "
        "that {o_he} made tea. [{hero} asked for an old map of the hills|{friend} wished to see the old road maps]. "
        "They turned out drawer after drawer without luck. Then, folded small, [the map fell out of|they found what "
        "they wanted between the pages of] a book called {book}. It showed a track that no one used any more, [past a "
        "lime kiln and a dry spring|over the moor and down by a quarry]. {hero} copied it on the back of a bill.",
        "In which book was the old map found in the library of {town}?",
        "book",
    ),
    "smith": (
        "A wheel of the borrowed cart broke on the hill before {town}. The smith there was {other}, [a person of few "
        'words|a giant with burned eyebrows], who looked at the wheel and then at the two of them. "I do not want '
        'coins," {o_he} said. "Bring me {thing} from the pedlar\'s tray, and you shall have your wheel." [It took '
        "them the whole afternoon to find the pedlar|The pedlar had already left, and {hero} ran after him]. By "
        "lamplight the new spokes were in, and the smith would not hear a word of thanks.",
        "What did the smith {other} want in exchange for mending the wheel?",
        "thing",
    ),
    "thief": (
        "Somewhere near {town} their purse was stolen. {friend} suspected a friendly youth who had walked with them "
        "since noon, and the constable, {other}, [agreed|sighed and put on {o_his} boots]. They searched his room and "
        "his pockets and found nothing. It was {hero} who [noticed the crumbs on the floor|saw that the dust had been "
        "disturbed] and at last found the purse {hiding}. The youth [wept|laughed], and the constable made him carry "
        "their luggage to the edge of the district.",
        "Where did {hero} find the stolen purse near {town}?",
        "hiding",
    ),
    "fever": (
        "Then {friend} fell ill. For two days they lay in a barn outside {town} while the rain came through the roof. "
        "An old herbalist called {other} heard of it and came [with a basket on {o_his} back|across the fields at "
        "night]. {o_he} boiled {herb} in milk, [said a rhyme over it|held {friend}'s nose] and poured it down. The "
        "fever broke [before dawn|by the next evening]. When {hero} asked what they owed, the answer was that debts "
        "to the sick are paid to the next sick person one meets.",
        "What did {other} boil in milk to cure {friend}?",
        "herb",
    ),
    "fair": (
        "They came to {town} on a fair day. There were jugglers, a two-headed lamb in a jar and a contest in throwing "
        "horseshoes, and {friend} [was pushed forward by the crowd|had never lost such a contest]. The champion, "
        "{other}, threw first and threw well. But {friend} [closed one eye|whistled through a gap in the teeth] and "
        "hit the peg three times. The prize was {thing}, [handed over by the mayor with a speech|tied up in a "
        "ribbon], and it was not very useful on a journey.",
        "What prize did {friend} win at the fair in {town}?",
        "thing",
    ),
    "child": (
        "On the common by {town} they met a small boy who was lost and would say only that his goat was called {pet}. "
        "[They carried him from door to door|{hero} put him on the mule]. At the ninth house {other} came running out "
        "with flour on both hands and wept, and laughed, and scolded. They were given [plum dumplings|a hot supper] "
        "and a bed in the hay, and in the morning the goat was found on the roof, quite calm.",
        "What was the name of the lost boy's goat?",
        "pet",
    ),
    "clock": (
        "The tower clock of {town} had stood still for {count} years, because [the only clockmaker had died|nobody "
        "could agree who should pay]. {other}, who swept the tower, let them climb up [for the view|out of the wind]. "
        "{hero} looked at the wheels, took out a dead swift and a handful of straw, and gave the pendulum a push. The "
        "clock struck at once, and went on striking. People ran into the square in their nightshirts. The two "
        "travellers thought it wise to leave by the back gate.",
        "For how many years had the tower clock of {town} stood still?",
        "count",
    ),
    "quarrel": (
        "Beyond {town} they quarrelled. It began with the salt and ended with everything that had been said since "
        "childhood. {friend} walked on the left side of the road and {hero} on the right, and they spoke only through "
        "the mule. A carter, {other}, [found this so funny|was so tired of it] that {o_he} [offered to judge the "
        "case|stopped the cart across the road]. The judgement was that both must sing the song about {inn} from the "
        "first verse to the last. By the seventh verse they could not remember why they were angry.",
        "About which inn did the carter {other} make them sing?",
        "inn",
    ),
    "orchard": (
        "The orchard keeper of {town}, {other}, let them stay for [picking|the harvest]. {o_he} was [almost "
        "blind|very old] and knew each tree by touch. On the last evening {o_he} told {hero} a secret: the deeds of "
        'the orchard, which two nephews had been seeking for years, lay hidden {hiding}. ["Tell nobody until I am '
        'gone," said the keeper|{hero} promised to keep silent]. They ate the last of the pears by the fire, and the '
        "dogs slept across their feet.",
        "Where were the deeds of the orchard hidden?",
        "hiding",
    ),
    "pass": (
        "Snow had come early to the pass above {town}. The guide, {other}, would go only if {o_his} dog went first, "
        "and the dog, which was called {pet}, [was in no hurry|had to be bribed with cheese]. They roped themselves "
        "together. [Twice the path broke away under the mule|The wind threw ice in their faces], and once {friend} "
        "vanished to the shoulders in a drift. At the stone hut on the top the guide lit a fire, pointed down at a "
        "thread of smoke far below, and told them that the worst was over.",
        "What was the name of the guide's dog on the pass above {town}?",
        "pet",
    ),
    "market": (
        "In the market of {town} everything was sold by weight, even hats. {hero} had promised to bring home a "
        "present and [went from stall to stall|could not make up {his} mind]. In the end a stallholder called {other} "
        "sold {him} {thing} for the price of a pound of onions, [and added a handful of nuts|and swore that it had "
        "belonged to a queen]. {friend} said that they had been cheated. All the way to the next milestone they "
        "argued about what a queen would do with such a thing.",
        "What did {hero} buy from {other} at the market of {town}?",
        "thing",
    ),
    "tower": (
        "For a time they lived with the keeper of the watchtower near {town}. {other} had kept the signal fire for "
        "{count} winters and had [never once been thanked|grown used to talking to crows]. The three of them took "
        "turns on the stairs. One night {hero} saw a light where no light should be and pulled the rope, and a [grain "
        "ship|fishing boat] turned away from the rocks in time. The captain sent up a barrel of pickled eggs, which "
        "was all that he had.",
        "For how many winters had {other} kept the signal fire?",
        "count",
    ),
    "mine": (
        "To avoid the toll they took the old mine tunnel under the hill at {town}. A watchman sat at the mouth of it, "
        "{other} by name, and asked for the password. {friend} tried the names of three saints. {hero}, who had "
        'listened at the pump that morning, said "{pet}", and the watchman [lifted the bar|moved {o_his} stool]. '
        "Inside it was warm and dripping. They counted their steps aloud so as not to be afraid, and came out among "
        "blackberries.",
        "What was the password for the mine tunnel at {town}?",
        "pet",
    ),
    "letter": (
        "From {town} they sent word home. {hero} wrote the letter by the light of a baker's oven, and {other}, who "
        "was going that way with geese, took charge of it. [Because of the robbers|Because letters were taxed], it "
        "was hidden {hiding}. [Months later they heard that it had arrived|It took nine weeks to arrive], and that "
        "the whole street had come to hear it read. {friend} had added a single line, which said only that the bread "
        "was better at home.",
        "Where was the letter home hidden when {other} took it from {town}?",
        "hiding",
    ),
    "theatre": (
        "A troupe of players was stuck in {town} because their prompter had run away. Their manager, {other}, begged "
        "the two to stay for one night. The play had been made from a book called {book}, and it had a [bear|ghost] "
        "in it. {hero} held the pages and whispered, {friend} was the [bear|ghost], and the public [threw "
        "carrots|cried in the right places]. They were paid in candle ends. Both of them thought about that evening "
        "for years.",
        "From which book had the play of the troupe in {town} been made?",
        "book",
    ),
    "bees": (
        "A swarm of bees had settled on the pulpit of the church at {town}, and the sexton, {other}, did not know "
        "what to do. {friend}, whose uncle had kept hives, asked for a sheet, a bucket and some smouldering {herb}. "
        "[The smoke made everyone cough|The whole village watched through the windows]. Slowly the bees went into the "
        "bucket like pouring grain. The sexton gave them the first honey of the year, still warm, and they ate it "
        "with their fingers behind the church wall.",
        "What did {friend} burn to drive the bees from the pulpit at {town}?",
        "herb",
    ),
    "portrait": (
        "An artist in {town} stopped {hero} in the street and asked {him} to sit for a portrait. {other} was painting "
        "the twelve months and needed a face for November. {hero} was not sure that it was a compliment. For {count} "
        "hours {he} sat on a barrel with a turnip in each hand, [while {friend} read the newspaper aloud|while the "
        "paint froze in its dishes]. They were allowed to see the picture at the end. November looked cold, patient "
        "and slightly offended, and it was very like.",
        "For how many hours did {hero} sit for the portrait by {other}?",
        "count",
    ),
}

ENDINGS = (
    "They reached {goal} on the day of the first snow. The aunt was sitting up in bed, scolding the nurse. She had "
    "never felt better, she said, and had only written because she was bored. {hero} began to laugh and could not "
    "stop. They stayed until spring, mended what was broken in the house, and were sent home at last with a clock, a "
    "cheese and her blessing.",
    "The cousin in {goal} had moved away long before, but the house was empty and the neighbours had the key. {hero} "
    "put the one tool on the windowsill and swept the floor. {friend} went out and came back with bread, a chair and "
    "the news that a workshop in the next street was to let. That evening it rained, and for the first time in months "
    "they listened to the rain from indoors.",
    "They walked into {goal} with an hour to spare. The lamps were being lit along the quay, and nobody took any "
    "notice of them. For proof {hero} asked the priest to sign a paper, and the priest asked what the wager had been "
    "for. Neither of them could remember the sum. They spent it, whatever it was, on two places in the coach going "
    "home.",
    "The lawyer in {goal} was kind and very deaf. The soap maker, it turned out, had spelled his name with one letter "
    "more. There was no fortune. But the lawyer needed a clerk who could read old hands and knew of a shop that "
    "needed a partner, and so neither of them went back. The key in the other town hung on its nail until it rusted "
    "through.",
    "In {goal} they found the clapper at once: it had been used for years as a doorstop in the school. The teacher "
    "gave it up without a word. Carrying it back took twice as long as coming, since it weighed as much as a calf. "
    "When the bell rang at last, somewhat out of tune, {hero} and {friend} were asleep in the cart below and did not "
    "hear it.",
)
