"""A shopping session: the effect of actions on the page. Only the search waits.

The rules are those of WebShop's text environment (web_agent_text_env.py, ``step`` and ``SimServer.receive``):

- ``search[words]`` searches from every page, also without a search bar, with the words in lower case. The published
  debugging queries ("<r>", "<a>", "<c>" and "<q>") are ordinary words here.
- ``click[label]`` clicks a label of the page, in any case; ``search`` and ``click`` themselves are in lower case.
- Choosing an option does not change the page, and a second value of the same option replaces the first. Going back to
  the results or to the search discards the chosen options.
- Any other text has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.worlds.shopping import pages
from experiments.worlds.shopping.catalogue import Catalogue
from experiments.worlds.shopping.goals import Goal
from experiments.worlds.shopping.pages import Page
from experiments.worlds.shopping.products import Product
from experiments.worlds.shopping.reward import OptionTexts, score_purchase
from experiments.worlds.shopping.search_index import ProductSearch


@dataclass(frozen=True, slots=True)
class ShopData:
    """The catalogue and the search that all sessions of a shop share."""

    catalogue: Catalogue
    search: ProductSearch
    option_texts: OptionTexts = "pairs"


class ShopSession:
    """A shopping session with a goal: keeps the current page and executes actions.

    ``page`` is the current page and ``options`` the chosen values by name. Once ``done``, ``score`` is the purchase's.
    """

    def __init__(self, goal: Goal, shop: ShopData) -> None:
        self.goal, self._shop = goal, shop
        self.page: Page = pages.search_page(goal.instruction)
        self.options: dict[str, str] = {}
        self.done = False
        self.score = 0.0
        self._results: tuple[Product, ...] = ()
        self._number = 1  # number of the page of results
        self._product: Product | None = None

    async def act(self, text: str) -> bool:
        """Execute an action such as "click[buy now]". Return False if the page does not offer it; it then has no
        effect.

        Raises InfrastructureError if the search fails.
        """
        name, argument = pages.parse_action(text)
        if self.done or argument is None:
            return False
        argument = argument.lower()
        if name == "search":
            self._results = await self._shop.search.find(argument, self._shop.catalogue)
            self._show_results(1)
            return True
        if name != "click" or argument not in self.page.clickables:
            return False
        self._click(argument)
        return True

    def _click(self, label: str) -> None:
        """Click a label of the current page. Buttons take precedence over options with the same name."""
        here = self.page.name
        if label == pages.BUY.lower():
            self._buy()
        elif label == pages.BACK.lower():
            self.options, self._product = {}, None
            self.page = pages.search_page(self.goal.instruction)
        elif label == pages.NEXT.lower() and here == pages.RESULTS:
            self._show_results(self._number + 1)
        elif label == pages.PREVIOUS.lower() and here == pages.RESULTS:
            self._show_results(self._number - 1)
        elif label == pages.PREVIOUS.lower() and here == pages.ITEM:
            self._show_results(self._number)
        elif label == pages.PREVIOUS.lower():
            self._show_item()
        elif label in pages.SUB_PAGES:
            self.page = pages.sub_page(self.goal.instruction, self._open_product, pages.SUB_PAGES[label])
        elif here == pages.RESULTS:
            self._product = next(product for product in self._results if product.asin.lower() == label)
            self._show_item()
        else:
            # If two options have the same value, the later one is chosen.
            name = next(option.name for option in reversed(self._open_product.options) if label in option.values)
            self.options = self.options | {name: label}

    @property
    def _open_product(self) -> Product:
        if self._product is None:
            raise RuntimeError(f"no product is open on the page {self.page.name}")
        return self._product

    def _show_results(self, number: int) -> None:
        self.options, self._product, self._number = {}, None, number
        shown = self._results[(number - 1) * pages.PAGE_SIZE : number * pages.PAGE_SIZE]
        self.page = pages.results_page(self.goal.instruction, shown, number, len(self._results))

    def _show_item(self) -> None:
        self.page = pages.item_page(self.goal.instruction, self._open_product)

    def _buy(self) -> None:
        self.done = True
        self.score = score_purchase(self._open_product, self.options, self.goal, self._shop.option_texts).total
        self.page = pages.end_page(self.score)
