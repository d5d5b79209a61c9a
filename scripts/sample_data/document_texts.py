"""Text of the documents: a catalogue, an expedition log, a street guide, a staff handbook, minutes of a society."""

from __future__ import annotations

WARES = {
    "object": (
        "a harpoon with a silver inlay;a lady's writing desk;a set of false teeth;a model of a lighthouse;a sledge "
        "for two dogs;a coffee roaster;a child's stilts;a weather vane in the shape of a pike;a travelling altar;a "
        "bottle corker;a mourning bonnet;a diver's helmet;a butter stamp;a magic lantern;a fire bucket;a spice chest;"
        "a flat iron heated with coal;a tavern sign;a bee skep;a mechanical nightingale;a postman's horn;a barber's "
        "bowl;a rope-walker's shoes;a snow globe;a hat press;a cheese press;a smuggler's walking stick;a printing "
        "plate;a mousetrap with four doors;a skating lantern"
    ).split(";"),
    "material": (
        "whalebone;pearwood;boiled leather;bell metal;papier-mache;soapstone;birch bark;felt;porcelain;walnut root;"
        "tinned iron;horn;plaited straw;slate;bog oak;cowhide;alabaster;cherry wood;pewter;beeswax;red clay;lead glass;"
        "sheepskin;ebony;cork;sandalwood;mother-of-pearl;hemp;linden wood;cast zinc"
    ).split(";"),
    "beast": (
        "a grey fox;a pair of cranes;a lame wolf;a snow hare;three otters;an albatross;a herd of wild asses;a horned "
        "owl;a nest of vipers;two lynx cubs;a swarm of locusts;a stray sheepdog;an eagle with a fish;a family of "
        "boars;a white stoat;a tortoise;a flock of bustards;a badger;a burrow of voles;an old stag;a pelican;"
        "a bear and its cub;a hoopoe;a line of caterpillars;a sleeping bat;a colony of marmots;a blind mole;a black "
        "stork;a wild cat;a kingfisher"
    ).split(";"),
    "camp": (
        "Kettle Spring;Widow's Ledge;Camp Patience;the Salt Steps;Thorn Hollow;Blue Boulder;the Dry Fork;Raven Shelf;"
        "Camp Misery;Two Cairns;the Ash Flats;Lantern Rock;Gull Basin;the Long Scree;Honey Gulch;Camp Sunday;the Red "
        "Gate;Hermit's Cave;Windy Saddle;the Mirror Pools;Split Oak;Camp Farewell;the Bone Field;Copper Creek;Moss "
        "Landing;the Upper Dunes;Goat Stairs;Camp Doubt;Crane Marsh;the Stone Table"
    ).split(";"),
    "street": (
        "Ropewalk Lane;Candle Street;Gander Row;Old Mint Street;Tanner's Yard;Plum Alley;Cooper Street;Bellfounder's "
        "Hill;Salt Market;Needle Lane;Miller's Walk;Drum Street;Vinegar Yard;Nightingale Row;Barley Street;Cold Bath "
        "Lane;Saddler's Steps;Friar's Passage;Lime Kiln Road;Pudding Court;Sexton Street;Whistle Lane;Hatter's Row;"
        "Duck Pond Road;Turnpike Street;Oyster Quay;Spindle Street;Hangman's Acre;Rosemary Lane;Powder Mill Road"
    ).split(";"),
    "shop": (
        "a bell maker;a violin repairer;a seller of second-hand maps;a kite shop;a pickle merchant;an umbrella clinic;"
        "a seed merchant;a stamp dealer;a chess cafe;a candle maker;a ship's chandler;a button shop;a puppet theatre;"
        "a tea blender;a glass-eye maker;a bird seller;a cider cellar;a hat museum;a brush factory;a music printer;a "
        "pie kitchen;a locksmith;a dance school;a rope maker;a paint mixer;a clock clinic;a saddlery;a fossil dealer;"
        "a weaver's co-operative;a typewriter exchange"
    ).split(";"),
    "subject": (
        "Keys;Bicycles;Lost property;Fire drills;Visitors;Night work;The canteen;Uniforms;First aid;Tools;Holidays;"
        "Pets;Umbrellas;Telephone calls;Post;Lifts;Waste paper;Overtime;Smoking;Birthdays;Parking;Sick notes;Music at "
        "work;Snow days;The roof terrace;Lockers;Photographs;Deliveries;Pay slips;Suggestions"
    ).split(";"),
    "item": (
        "a ladder with nine rungs;forty bean poles;a weighing beam;new hinges for the gate;a cider press;a water butt;"
        "two wheelbarrows;a notice board;a load of river sand;a hedge of hazel;a roof for the shed;sixty tulip bulbs;"
        "a stove pipe;a scarecrow contest;a second-hand mower;a bench by the pond;a bonfire permit;a rat trap;a rain "
        "gauge;a strip of carpet;the painting of the fence;a brass tap;a flag;a box of labels;the repair of the pump;"
        "a visit to a nursery;a lecture on mildew;a new lock;a set of cups;a hive of bees"
    ).split(";"),
    "reason": (
        "the old one had been borrowed and not returned;the frost had done great damage;the neighbours had complained;"
        "a former member had left a legacy;the children had asked for it;the price would rise in spring;the insurance "
        "required it;the wood was rotten;the competition had one already;the council offered half;nobody could find "
        "the key;the last storm had carried it off;it had been promised for years;the president was tired of hearing "
        "about it;there was money left from the summer feast;a goat had eaten the first;the doctor advised it;the "
        "seller was leaving the country;the path had become a stream;moles had undone all the work;two members had "
        "hurt themselves;a newspaper had made fun of the society;the bishop was expected;the winter had been too mild;"
        "the tools were rusting;the pears had been stolen;the weeds had won;the view was spoiled;a wager had been "
        "lost;it was needed for the jubilee"
    ).split(";"),
}

DOCUMENTS: tuple[dict, ...] = (
    {
        "bags": ("object", "material"),
        "head": "Catalogue of the {place} House of Everyday Things, prepared by the curator, {who}. The rooms are "
        "numbered from the entrance. Visitors are asked not to lean on the cases. Where the maker of a piece is "
        "known, the name is given; where the giver is known, the name is given too, with thanks.",
        "entries": (
            "No. {no}. This is {object}. [The piece is of {material}|It is made of {material}] and was given to the "
            "house by {name} in {year}. [A small repair can be seen from the left|The varnish is not the original "
            "one]. It stands in room {small}.",
            "No. {no}. In room {small} hangs {object}, [worked in {material}|for which {material} was used]. The "
            "giver was {name}, who came with it in {year} [on a handcart|wrapped in a curtain] and would take no "
            "receipt.",
            "No. {no}. Given in {year} by {name}: {object}. [Experts were surprised by the material, {material}|The "
            "use of {material} is unusual]. The museum in {town} has a similar piece. Room {small}, near the window.",
            "No. {no}. Few visitors pass {object} in room {small} without a smile. [It consists of {material}|Its "
            "maker chose {material}], and it was in daily use until {name} gave it away in {year}. [Please do not "
            "touch|Children may touch it].",
        ),
        "tail": "The house is open daily except on Mondays. A list of pieces in store can be seen in the office. "
        "Corrections to this catalogue are welcome, [above all from the families of givers|and will be printed in the "
        "next edition].",
        "question": ("Who gave {object} to the house?", "name"),
    },
    {
        "bags": ("beast", "camp"),
        "head": "Log of the crossing of the inner plateau, kept by {who} for the Geographical Club of {place}. "
        "Distances were taken with a measuring wheel. Where the wheel broke they are guessed, and this is said. "
        "Spelling was corrected by the printer.",
        "entries": (
            "Day {no}. [Rose at five|Rose before light]. Marched {small} hours [against the wind|over loose stones] "
            "and pitched the tents at {camp}. {name} saw {beast} [at dusk|near the water]. [The mules are "
            "restless|Flour is running low].",
            "Day {no}. [Fog until noon|Heavy frost]. {name} went ahead and met {beast}, which did not move. We "
            "followed after {small} hours and made our camp at {camp}. [Nobody spoke at supper|There was singing for "
            "once].",
            "Day {no}. A good day. [The ground is hard|The track is clear]. At {camp}, where we spend the night, we "
            "are {amount} feet above the sea. [In the afternoon|At breakfast] {name} drew {beast} in the field book.",
            "Day {no}. [Rest day, by order|We had meant to rest]. {name} mended the wheel, and then, to the delight "
            "of all, found {beast} behind the tents. Towards evening we moved down to {camp} [to be out of the "
            "wind|for the sake of the grass].",
        ),
        "tail": "The expedition was met by the club's wagon on the next morning. [Nobody had been lost|All returned in "
        "good health], and the mules were sold at a profit.",
        "question": ("At which place did the expedition camp on the day when {name} saw {beast}?", "camp"),
    },
    {
        "bags": ("street", "shop"),
        "head": "A walk through the old quarter of {place}, written for visitors by {who}. The walk takes half a day "
        "at a slow pace. It begins at the railway station and ends at the harbour steps. Good shoes are advised, "
        "since the paving is as old as the houses.",
        "entries": (
            "[Turn left into {street}|Go on to {street}]. In {year} a fire began here, in the house of {name}, and "
            "stopped only at the river. Today you will find {shop} on the spot. [Look up: the beams are charred|The "
            "number {small} on the door is original].",
            "{street} comes next. [It was laid out for {name}|It belonged to {name}], whose cattle were driven "
            "through it. A stone with the year {year} marks the drinking trough. [At the corner|At number {small}] "
            "there is {shop}, [open in the mornings|well worth a visit].",
            "[You are now in {street}|This brings you to {street}], [so narrow that carts could not pass|once the "
            "noisiest in the town]. {name} was born at number {small}. The ground floor is let to {shop}. In {year} "
            "the tram was extended to this place and soon shortened again.",
            "Cross over to {street}. The painted front is by {name}, who was paid {amount} marks for it in {year}. "
            "[Some found the price scandalous|Nobody liked it then]. Behind the second door, {shop} has been in "
            "business for {small} years.",
        ),
        "tail": "From the harbour steps a boat returns to the station every hour. [Tired walkers may take the tram|The "
        "last one leaves at nine].",
        "question": ("In which street does the visitor find {shop}?", "street"),
    },
    {
        "bags": ("subject",),
        "head": "Handbook for the staff of {firm}, {place}. It replaces all earlier notices. New staff sign for their "
        "copy on the first day. The person to ask in all matters that are not treated here is {who}, whose office is "
        "opposite the lift.",
        "entries": (
            "{no}. {subject}. [Questions about this go to {name}|{name} is in charge of this]. A form must be handed "
            "in {small} days before. [Late forms are not read|Late forms are returned]. A fine of {amount} pence is "
            "charged in the case of misuse and goes to the fund for outings.",
            "{no}. {subject}. Since {year} the rule has been simple: [ask first|one at a time]. The responsible "
            "person is {name}, who can be found in room {amount}. After {small} cases in one year the matter is taken "
            "to the board.",
            "{no}. {subject}. [This has led to quarrels|Much has been said about this]. The agreement of {year}, made "
            "with {name}, still holds. Each department has a quota of {small}, and the book is kept in room {amount}. "
            "[Nobody may sign for another|Entries in pencil do not count].",
            "{no}. {subject}. Staff at the works in {town} follow their own custom. [All others|Here, all staff] "
            "write to {name}. An answer is given within {small} working days, and after that consent may be assumed. "
            "The file number is {amount}.",
        ),
        "tail": "Changes are put up on the board by the gate. [A copy in large print is available|The printer's errors "
        "are listed at the end of each year].",
        "question": ('Which person is named in the handbook\'s section on "{subject}"?', "name"),
    },
    {
        "bags": ("item", "reason"),
        "head": "Minutes of the Allotment Society of {place}, copied out for the jubilee by {who}. Only decisions are "
        "given here. The speeches, which were long, are kept in the second cupboard. All votes were taken by a show "
        "of hands.",
        "entries": (
            "Meeting {no}, {year}. {name} moved that money be spent on {item}, because {reason}. [Carried by {small} "
            "votes|Carried after an hour]. The cost was {amount} marks. [There was coffee|The meeting closed with a "
            "song].",
            "Meeting {no}, {year}. [In the chair: {name}|{name} took the chair]. The subject was {item}. It was said "
            "that {reason}. A sum of {amount} marks was voted with {small} against. [The treasurer sighed|The "
            "treasurer abstained].",
            "Meeting {no}, {year}. [After a long debate|In great unity] the society agreed to {item}. The reason "
            "given was that {reason}. {name} will see to it. {amount} marks were set aside. [Present: {small}|Absent: "
            "{small}].",
            "Meeting {no}, {year}. A letter by {name} was read. It asked for {item} on the ground that {reason}. "
            "[Agreed|Agreed without a vote], at a price of {amount} marks, and [with the usual grumbling|{small} "
            "members shook hands on it].",
        ),
        "tail": "Here the second book of minutes ends. [The third one was lost|The third is still in use]. The society "
        "thanks all who lent their diaries.",
        "question": ("Why did the society decide on {item}?", "reason"),
    },
)
