"""What the invented world is made of: word pools, kinds of entities, relations.

Every name is put together from a small pool of reusable words that the tokenizer holds whole, shared between
entities, so that retrieval has to tell entities apart and a tiny model still has to copy two or three tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    PERSON = "person"
    TOWN = "town"
    COMPANY = "company"
    BOOK = "book"
    FESTIVAL = "festival"


FIRST_NAMES = (
    "Ada Alma Anton Arvid Basil Berta Bruno Carla Cato Clara Conrad Dora Edgar Edith Elias Elsa Emil Erna Felix Flora "
    "Frida Georg Greta Gustav Hanna Hedda Hugo Ida Ingrid Irma Ivo Jakob Jonas Karla Kaspar Klara Lars Lena Leo Lotte "
    "Lukas Magda Marta Max Mira Moritz Nadia Nils Nora Olga Oskar Otto Paula Petra Rosa Rufus Selma Sigrid Stella Sven "
    "Thea Tilda Tom Ulla Vera Viktor Vilma Walter Wanda Willem Yara Yusuf"
).split()
LAST_NAMES = (
    "Abel Adler Arden Ashby Barlow Beck Berg Birk Blum Brandt Brook Carver Cole Crane Dahl Dane Drake Egan Falk Farrow "
    "Finch Ford Frost Gale Garner Gray Hale Hardt Hart Heath Holm Horn Hunter Jansen Kemp Kern Kettle Lang Lark Lind "
    "Lowe Marsh Mohr Moss Nash Nord Oakes Olsen Parr Pike Quill Rand Reed Rhodes Roth Rowe Sand Shaw Stein Storm Thorn "
    "Tully Vance Vogel Voss Wade Walsh Webb Wells Wolf Yates Zeller"
).split()
PROFESSIONS = (
    "baker botanist brewer carpenter cellist chemist dancer diver doctor farmer gardener glazier judge lawyer mason "
    "miller miner painter pilot poet potter sailor smith tailor teacher weaver"
).split()
ADJECTIVES = (
    "Amber Ancient Autumn Bitter Black Blue Bright Broken Bronze Calm Cold Copper Crimson Crystal Dark Distant Dry Early "
    "Eastern Empty Fallen Far First Flat Frozen Gentle Golden Great Green Grey Hidden High Hollow Iron Lone Long Lost Low "
    "Marble Misty New Northern Old Open Pale Proud Quiet Red Restless Royal Rusty Salt Secret Sharp Short Silent Silver "
    "Southern Spring Still Stone Sunny Sweet Tall Upper Velvet Warm Western White Wild Winter"
).split()
TOWN_NOUNS = (
    "Bay Bridge Castle Cliff Cove Creek Crossing Dale Falls Field Gate Glen Grove Harbor Haven Hill Hollow Island Lake "
    "Landing Meadow Mill Mouth Orchard Pass Point Port Ridge River Rock Shore Tower Vale Valley Well Wood"
).split()
BOOK_NOUNS = (
    "Bell Bird Bridge Candle Castle Clock Crown Door Dream Garden Ghost Harbor Horse Island Journey Key Lake Lantern "
    "Letter Lion Map Mill Mirror Moon Orchard Ring River Road Rose Sail Shadow Ship Song Sword Tower Tree Valley Wind"
).split()
COMPANY_NOUNS = "Brothers Foundry Glassworks Group Mills Motors Partners Press Shipping Steel Trust Works".split()
FESTIVAL_NOUNS = "Ball Carnival Concert Contest Fair Feast Games Gathering Jubilee Market Parade Race Regatta".split()


@dataclass(frozen=True, slots=True)
class Relation:
    """A functional relation ``subject -> object``.

    ``keyword`` is the only word by which passages name it; none of ``phrases`` contains it, so a query that repeats
    the question finds the wrong passage: the query has to be rewritten.
    """

    keyword: str
    subject: Kind
    object: Kind
    phrases: tuple[str, ...]  # noun phrases with {x} for the subject


def _relations() -> tuple[Relation, ...]:
    person, town, company, book, festival = Kind.PERSON, Kind.TOWN, Kind.COMPANY, Kind.BOOK, Kind.FESTIVAL
    table = (
        (person, "birthplace", town, "the town where {x} was born", "the native town of {x}", "the town {x} came from"),
        (person, "employer", company, "the firm that pays {x}", "the company {x} works for", "the firm {x} serves"),
        (person, "mentor", person, "the person who taught {x}", "the one who trained {x}", "the tutor of {x}"),
        (person, "spouse", person, "the person married to {x}", "the partner of {x}", "the one {x} wed"),
        (person, "memoir", book, "the book about the life of {x}", "the life story of {x}", "what {x} wrote in old age"),
        (town, "mayor", person, "the person who governs {x}", "the head of {x}", "the one elected to lead {x}"),
        (town, "twin", town, "the sister town of {x}", "the town paired with {x}", "the town {x} has a pact with"),
        (town, "celebration", festival, "the yearly event of {x}", "the event held in {x}", "what {x} hosts each year"),
        (town, "supplier", company, "the firm that feeds {x}", "the company {x} buys from", "the firm serving {x}"),
        (town, "chronicle", book, "the book on the past of {x}", "the written history of {x}", "the book about {x}"),
        (company, "founder", person, "the person who started {x}", "the creator of {x}", "the one who set up {x}"),
        (company, "headquarters", town, "the town where {x} sits", "the home town of {x}", "the base of {x}"),
        (company, "rival", company, "the firm that competes with {x}", "the competitor of {x}", "the firm {x} fights"),
        (company, "sponsorship", festival, "the event {x} pays for", "the event backed by {x}", "what {x} funds"),
        (company, "director", person, "the person who runs {x}", "the boss of {x}", "the one in charge of {x}"),
        (book, "author", person, "the person who wrote {x}", "the writer of {x}", "the one who penned {x}"),
        (book, "setting", town, "the town where {x} takes place", "the town shown in {x}", "the scene of {x}"),
        (book, "publisher", company, "the firm that printed {x}", "the company that sells {x}", "the firm behind {x}"),
        (book, "translator", person, "the person who put {x} into other tongues", "the linguist of {x}", "the one who rendered {x}"),
        (book, "sequel", book, "the book that follows {x}", "the next part of {x}", "the book after {x}"),
        (festival, "venue", town, "the town that hosts {x}", "the place of {x}", "the town where {x} is held"),
        (festival, "winner", person, "the person who won {x}", "the champion of {x}", "the one who came first at {x}"),
        (festival, "organizer", company, "the firm that plans {x}", "the company that stages {x}", "the firm arranging {x}"),
        (festival, "patron", person, "the person who protects {x}", "the guardian of {x}", "the one who blesses {x}"),
        (festival, "prize", book, "what one gets at {x}", "the trophy of {x}", "the book handed out at {x}"),
    )
    return tuple(Relation(keyword, subject, obj, phrases) for subject, keyword, obj, *phrases in
                 ((row[0], row[1], row[2], *row[3:]) for row in table))


RELATIONS: tuple[Relation, ...] = _relations()
RELATIONS_OF: dict[Kind, tuple[Relation, ...]] = {
    kind: tuple(r for r in RELATIONS if r.subject is kind) for kind in Kind
}
