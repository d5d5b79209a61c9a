"""Our own short lists of plain English words, from which keys are made."""

from __future__ import annotations

import random

ADJECTIVES = tuple(
    """
    agile airy amber ample ancient arctic autumn azure balmy bare bashful bitter blank blazing blue blunt bold brave
    breezy brief bright brisk broad bronze calm careful cheerful chilly civic clean clever coarse cobalt copper coral
    cosy crimson crisp curious curved damp daring dark deep dense distant dizzy dreamy dry dusky dusty eager early
    elegant even faint famous fancy fearless fertile fierce firm flat fleet floral fluent foggy fond frank fresh frosty
    frugal gentle giddy gilded glad gleaming glossy golden graceful grand gravelly green grey handy hardy hasty hazy
    hearty hidden hollow honest humble icy idle ivory jolly keen kind lavish lazy lean level light lively lofty lone
    loud loyal lucid lunar mellow merry mighty mild misty modest mossy muddy muted narrow neat nimble noble northern
    oaken olive open orderly outer pale patient peaceful plain pleasant polite prompt proud quaint quick quiet rapid
    rare ready regal rocky rosy rough round royal rugged rural rustic salty sandy scarlet secret serene shady sharp
    shiny silent silver simple sleek slender slow smooth snowy sober soft solar solid southern sparse spry stark steady
    steep stout stray sturdy subtle sunny swift tall tame tart tender thin thorny tidal tidy tiny tranquil true upper
    urban vast velvet violet vivid warm wary wavy western wide wild wise witty wooden woolly young zesty
    """.split()
)

NOUNS = tuple(
    """
    acorn almond anchor anvil apple apron arbor arch arrow atlas badger bakery balcony banjo barge barley barrel basin
    basket beacon beaver bell bench berry bicycle birch biscuit blanket blossom boat bottle boulder bramble branch
    brick bridge broom brook bucket buckle button cabbage cabin cactus camel candle canoe canyon carpet carrot castle
    cavern cedar cellar cello chair chapel cherry chestnut chimney cinder clarinet cliff clock cloud clover coach
    cobbler compass cottage cradle crane crater cricket crown curtain cushion daisy dolphin donkey drum eagle easel
    engine falcon feather fender ferry fiddle fig finch flask flute forest fountain fox gallery garden garlic gate
    gazebo geyser ginger glacier glove goblet goose granite grove guitar hammer hammock harbour harp hazel hedge helmet
    heron hill hinge island jacket jasmine jug juniper kayak kettle kite ladder ladle lagoon lake lantern lark lemon
    lentil lever lichen lily lizard lobster locket loom magnet mallet mango maple marble market marsh meadow melon
    mill mirror mitten moth mountain mulberry mushroom needle nettle nutmeg oar oasis onion orchard orchid otter oven
    owl paddle panda parcel parrot parsley path peach pear pebble pelican pepper piano pier pigeon pillow pine planet
    plough plum pocket pond poppy prairie puffin pulley pumpkin quarry quilt rabbit raft raven reef ribbon ridge river
    robin rocket rope rudder saddle saffron sail salmon sandal saucer scarf seal shelter shore shovel sparrow spindle
    spoon spruce squirrel stable starling statue stool stove stream swan tailor teapot temple thimble thistle thread
    tower trail trumpet tulip tunnel turnip turtle valley vase vineyard violin wagon walnut walrus waterfall weasel
    wharf wheel whistle willow window wren zebra zither
    """.split()
)


def word_key(draw: random.Random) -> str:
    """An adjective and a noun joined by a hyphen."""
    return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"
