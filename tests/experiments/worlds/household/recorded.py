"""A kitchen of six receptacles, and what alfworld 0.4.2 said in it; recorded once, command by command."""

from experiments.worlds.household.alfworld_tables import PROPERTIES
from experiments.worlds.household.games import Game, Goal, Item, Receptacle


def item(kind: str, number: int, place: str) -> Item:
    return Item(kind, number, place, tuple(word for word, having in sorted(PROPERTIES.items()) if kind in having))


RECEPTACLES = (
    Receptacle("CounterTop", 1, False),
    Receptacle("Fridge", 1, True),
    Receptacle("Microwave", 1, True),
    Receptacle("SinkBasin", 1, False),
    Receptacle("SinkBasin", 2, False),
    Receptacle("Desk", 1, False),
)
ITEMS = (
    item("Apple", 1, "countertop 1"),
    item("Apple", 2, "fridge 1"),
    item("Knife", 1, "countertop 1"),
    item("Mug", 1, "sinkbasin 2"),
    item("DeskLamp", 1, "desk 1"),
)
HOT_APPLE = Game(
    Goal("pick_heat_then_place_in_recep", "Apple", "Fridge", None), "put a hot apple in fridge", RECEPTACLES, ITEMS
)

OPENING = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a "
    "countertop 1, a desk 1, a fridge 1, a microwave 1, a sinkbasin 2, and a sinkbasin 1.\n\n"
    "Your task is to: put a hot apple in fridge."
)
AT_FIRST = (
    "go to countertop 1", "go to desk 1", "go to fridge 1", "go to microwave 1", "go to sinkbasin 1",
    "go to sinkbasin 2", "help", "inventory", "look",
)  # fmt: skip
HELP = (
    "Available commands:\n  look:                             look around your current location\n"
    "  inventory:                        check your current inventory\n"
    "  go to (receptacle):               move to a receptacle\n"
    "  open (receptacle):                open a receptacle\n"
    "  close (receptacle):               close a receptacle\n"
    "  take (object) from (receptacle):  take an object from a receptacle\n"
    "  move (object) to (receptacle):  place an object in or on a receptacle\n"
    "  examine (something):              examine a receptacle or an object\n"
    "  use (object):                     use an object\n"
    "  heat (object) with (receptacle):  heat an object using a receptacle\n"
    "  clean (object) with (receptacle): clean an object using a receptacle\n"
    "  cool (object) with (receptacle):  cool an object using a receptacle\n"
    "  slice (object) with (object):     slice an object using a sharp object\n"
)
NOTHING = "Nothing happens."

PLAY = (
    ("look", "You are in the middle of a room. Looking quickly around you, you see nothing."),
    ("inventory", "You are not carrying anything."),
    ("help", HELP),
    ("open fridge 1", NOTHING),
    ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
    ("look", "You are facing the fridge 1. Next to it, you see nothing."),
    ("take apple 2 from fridge 1", NOTHING),
    ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a apple 2."),
    ("open fridge 1", NOTHING),
    ("examine apple 2", NOTHING),
    ("examine fridge 1", "The fridge 1 is open. In it, you see a apple 2."),
    ("take apple 2 from fridge 1", "You pick up the apple 2 from the fridge 1."),
    ("take apple 1 from countertop 1", NOTHING),
    ("inventory", "You are carrying: a apple 2."),
    ("examine apple 2", "There's nothing special about apple 2."),
    ("cool apple 2 with fridge 1", "You cool the apple 2 using the fridge 1."),
    ("examine apple 2", "This is a cold apple 2."),
    ("close fridge 1", "You close the fridge 1."),
    ("move apple 2 to fridge 1", NOTHING),
    ("examine fridge 1", "The fridge 1 is closed."),
    ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
    ("go to microwave 1", NOTHING),
    ("heat apple 2 with microwave 1", "You heat the apple 2 using the microwave 1."),
    ("examine apple 2", "This is a hot apple 2."),
    ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing."),
    ("clean apple 2 with sinkbasin 1", "You clean the apple 2 using the sinkbasin 1."),
    ("examine apple 2", "This is a hot and clean apple 2."),
    ("heat apple 2 with microwave 1", NOTHING),
    ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a apple 1, and a knife 1."),
    ("move apple 2 to countertop 1", "You move the apple 2 to the countertop 1."),
    ("take knife 1 from countertop 1", "You pick up the knife 1 from the countertop 1."),
    ("slice apple 1 with knife 1", "You sliced the apple 1 with the knife 1."),
    ("go to desk 1", "You arrive at desk 1. On the desk 1, you see a desklamp 1."),
    ("use desklamp 1", "You turn on the desklamp 1."),
    ("use desklamp 1", "You turn on the desklamp 1."),
    ("take desklamp 1 from desk 1", NOTHING),
    ("move knife 1 to desk 1", NOTHING),
    ("go to sinkbasin 2", "You arrive at sinkbasin 2. On the sinkbasin 2, you see a mug 1."),
    ("move knife 1 to sinkbasin 2", "You move the knife 1 to the sinkbasin 2."),
    ("take mug 1 from sinkbasin 2", "You pick up the mug 1 from the sinkbasin 2."),
    ("clean mug 1 with sinkbasin 2", "You clean the mug 1 using the sinkbasin 2."),
    ("examine mug 1", "This is a normal mug 1. In it, you see nothing."),
    ("move mug 1 to sinkbasin 2", "You move the mug 1 to the sinkbasin 2."),
    ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a apple 2, and a apple 1."),
    ("take apple 2 from countertop 1", "You pick up the apple 2 from the countertop 1."),
    ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
    ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see nothing."),
    ("move apple 2 to fridge 1", "You move the apple 2 to the fridge 1."),
)  # the last one wins
WITH_KNIFE = (  # after "take knife 1 from countertop 1"
    "examine countertop 1", "examine knife 1", "go to desk 1", "go to fridge 1", "go to microwave 1",
    "go to sinkbasin 1", "go to sinkbasin 2", "help", "inventory", "look", "move knife 1 to countertop 1",
    "slice apple 1 with knife 1", "slice apple 2 with knife 1",
)  # fmt: skip
AT_FRIDGE = (  # after the last "open fridge 1"
    "close fridge 1", "cool apple 2 with fridge 1", "examine apple 2", "examine fridge 1", "go to countertop 1",
    "go to desk 1", "go to microwave 1", "go to sinkbasin 1", "go to sinkbasin 2", "help", "inventory", "look",
    "move apple 2 to fridge 1",
)  # fmt: skip
