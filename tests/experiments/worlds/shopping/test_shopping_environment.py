"""The shop as an environment: observations, rewards, measures, faults, and a real Lucene index."""

import asyncio
import json

import pytest

from experiments.worlds.shopping.catalogue import write_catalogue
from experiments.worlds.shopping.environment import Shopping
from experiments.worlds.shopping.expert import ShoppingExpert
from experiments.worlds.shopping.generate import generate_catalogue
from experiments.worlds.shopping.goals import as_task, make_goals
from experiments.worlds.shopping.search_index import ProductSearch, passage, write_corpus
from retrieval.index import BuildIndex
from retrieval.process import RetrieverProcess
from rollout.trajectory import Action, ActionKind, CallOutcome, InfrastructureError, Task, ToolCall, ToolRequest
from tests.experiments.worlds.shopping.shopping_world import WordRetriever, catalogue_file, goal, published_catalogue


def act(*texts):
    return Action(ActionKind.CALL, calls=tuple(ToolRequest("act", {"action": text}) for text in texts))


def with_shop(folder, use, wanted=None, **options):
    """Open WebShop's small shop, hand an environment and the retriever to ``use``."""
    file = catalogue_file(folder)

    async def main():
        retriever = WordRetriever(published_catalogue(folder))
        shop = Shopping(file, retriever, **options)
        await shop.start()
        try:
            return await use(shop(as_task(wanted or goal(), 0, "train")), retriever)
        finally:
            await shop.close()

    return asyncio.run(main())


def test_an_episode(tmp_path):
    async def use(environment, retriever):
        opening = await environment.reset()
        steps = [await environment.step(act(text)) for text in ("search[shirt]", "click[b000000001]", "click[red]")]
        steps.append(await environment.step(act("click[small]", "click[buy now]", "click[buy now]")))
        await environment.close()
        return opening, steps

    opening, steps = with_shop(tmp_path, use)
    assert opening.text == "WebShop [SEP] Instruction: [SEP] find me a shirt [SEP] Search"
    assert opening.info == {"admissible": ["search[<your query>]"], "has_search_bar": True, "page": "search"}
    assert [step.done for step in steps] == [False, False, False, True]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 10.0]
    assert steps[0].measures == {"score": 0.0, "success": 0.0}
    assert steps[-1].measures == {"score": 1.0, "success": 1.0}
    assert [result.outcome for result in steps[-1].results] == [CallOutcome.OK, CallOutcome.OK, CallOutcome.REFUSED]
    assert len(steps[-1].latencies_s) == 3
    assert steps[0].results[0].info["page"] == "results" and "B000000001" in steps[0].results[0].text
    json.dumps(steps[0].results[0].info)


def test_the_way_options_are_compared_is_an_option(tmp_path):
    async def use(environment, retriever):
        for text in ("search[shirt]", "click[b000000001]", "click[light | blue]"):
            await environment.step(act(text))
        return (await environment.step(act("click[buy now]"))).measures["score"]

    wanted = goal(options=(("color", "lightblue"),))
    assert with_shop(tmp_path, use, wanted, option_texts="values") == 1.0
    assert with_shop(tmp_path, use, wanted) == pytest.approx(2 / 3)


@pytest.mark.parametrize("text", ["dance", "click[buy now]"])
def test_what_does_nothing_gives_the_page_again(tmp_path, text):
    async def use(environment, retriever):
        opening = await environment.reset()
        return opening, await environment.step(act(text))

    opening, step = with_shop(tmp_path, use)
    [result] = step.results
    assert (result.outcome, result.text, result.info) == (CallOutcome.ERROR, opening.text, opening.info)
    assert (step.done, step.reward) == (False, 0.0)
    result.detail.encode()  # can be written down


def test_actions_that_are_none(tmp_path):
    async def use(environment, retriever):
        invalid = await environment.step(Action(ActionKind.INVALID, error="no action"))
        wrong = await environment.step(
            Action(ActionKind.CALL, calls=(ToolRequest("act", {"action": 7}), ToolRequest("search", {"query": "x"})))
        )
        answer = await environment.step(Action(ActionKind.ANSWER, answer="bought"))
        return invalid, wrong, answer

    invalid, wrong, answer = with_shop(tmp_path, use)
    assert (invalid.results, invalid.done, invalid.reward) == ((), False, 0.0)
    assert [result.outcome for result in wrong.results] == [CallOutcome.ERROR, CallOutcome.REFUSED]
    assert "found int" in wrong.results[0].detail
    assert (answer.results, answer.done, answer.measures) == ((), True, {"score": 0.0, "success": 0.0})


def test_without_tools_the_shop_is_closed(tmp_path):
    file = catalogue_file(tmp_path)

    async def main():
        shop = Shopping(file, WordRetriever(published_catalogue(tmp_path)))
        with pytest.raises(RuntimeError, match="await start"):
            shop(as_task(goal(), 0, "train"))
        await shop.start()
        closed = shop(as_task(goal(), 0, "train"), tools_enabled=False)
        with pytest.raises(ValueError, match="its metadata has no 'shopping'"):
            shop(Task("t", "", (), ""))
        with pytest.raises(ValueError, match="its product B777 is not in the catalogue .*catalogue.jsonl"):
            shop(as_task(goal(asin="B777"), 0, "train"))
        return (await closed.step(act("search[shirt]"))).results[0]

    assert asyncio.run(main()).outcome is CallOutcome.REFUSED


def test_a_failing_search_is_an_infrastructure_error(tmp_path):
    async def use(environment, retriever):
        retriever.fails = True
        with pytest.raises(InfrastructureError, match="the shop's search failed"):
            await environment.step(act("search[shirt]"))

    with_shop(tmp_path, use)


def test_a_branch_takes_up_where_its_parent_was(tmp_path):
    texts = ["search[shirt]", "dance", "click[b000000001]", "click[red]"]

    async def use(environment, retriever):
        calls = []
        for turn, text in enumerate(texts):
            request = ToolRequest("act", {"action": text})
            step = await environment.step(Action(ActionKind.CALL, calls=(request,)))
            calls.append(ToolCall(turn, request, step.results[0], 0.0))
        return calls, step.results[0].text

    calls, text = with_shop(tmp_path, use)

    async def resumed(environment, retriever):
        assert await environment.resume((), calls) == 0.0
        return (await environment.step(act("click[small]", "click[buy now]"))).reward, environment

    reward, _ = with_shop(tmp_path, resumed)
    assert reward == 10.0 and "Buy Now" in text


def test_an_index_of_other_texts_is_told_at_the_start(tmp_path):
    file = catalogue_file(tmp_path)
    other = generate_catalogue(30, seed=1)
    other_index = WordRetriever(other)
    shop = Shopping(file, other_index)

    async def search(queries, k):
        return [other_index._best({"with"}, k) for _ in queries]

    other_index.search = search
    with pytest.raises(ValueError, match="which are not in the catalogue"):
        asyncio.run(shop.start())


def test_goals_that_cannot_be_shopped_for_are_found_before_training(tmp_path):
    file = catalogue_file(tmp_path)
    shop = Shopping(file, WordRetriever(generate_catalogue(3)))
    good, elsewhere = as_task(goal(), 0, "train"), as_task(goal(asin="B999999999"), 1, "train")
    shop.check([good])
    with pytest.raises(ValueError) as error:
        shop.check([good, elsewhere, Task("none", "", (), "")])
    assert "shopping-train-1: its product B999999999 is not in" in str(error.value)
    assert "task none: its metadata has no 'shopping'" in str(error.value)


def test_a_passage_holds_the_published_words(tmp_path):
    shirt, shampoo, lamp = published_catalogue(tmp_path).products
    assert passage(shirt) == {
        "id": "B000000001",
        "contents": '"norvik men\'s shirt, slim fit"\na light shirt. 100% cotton color: light | blue, red, and size: '
        "small, x-large",
    }
    assert passage(shampoo)["contents"] == '"tamrose shampoo"\nwith tea tree'
    assert passage(lamp)["contents"] == '"lamp"\n.'


async def episode(shop, task, expert, turns=15):
    """The reward of an expert's visit, and what it did."""
    environment, past = shop(task), []
    info = (await environment.reset()).info
    for _ in range(turns):
        past.append(expert.next_action(task, info, past))
        step = await environment.step(act(past[-1]))
        assert step.results[0].outcome is CallOutcome.OK, past
        info = step.results[0].info
        if step.done:
            break
    return step.reward, past


@pytest.mark.slow
def test_the_expert_buys_what_is_wanted_in_a_shop_with_a_real_lucene_index(tmp_path):
    catalogue = generate_catalogue(150, seed=4)
    write_catalogue(catalogue, tmp_path / "catalogue.jsonl")
    write_corpus(catalogue, tmp_path / "corpus.jsonl")
    index = BuildIndex(str(tmp_path / "corpus.jsonl")).run(tmp_path)["index"]
    tasks = [as_task(wanted, n, "train") for n, wanted in enumerate(make_goals(catalogue)[:60])]
    odd = ("\udcff\x00", "AND OR (", "x" * 10_000, "é 日本", " ")

    async def main():
        retriever = RetrieverProcess(index)
        shop, search = Shopping(str(tmp_path / "catalogue.jsonl"), retriever), ProductSearch(retriever)
        await shop.start()
        await shop.start()
        try:
            played = await asyncio.gather(*(episode(shop, task, ShoppingExpert()) for task in tasks))
            found = await search.find(catalogue.products[0].title.upper(), catalogue)
            return played, found, [await search.find(text, catalogue) for text in odd]
        finally:
            await shop.close()

    played, found, strange = asyncio.run(main())
    assert [reward for reward, _ in played] == [10.0] * len(tasks)
    assert max(len(past) for _, past in played) <= 8
    assert found[0] == catalogue.products[0] and 1 < len(found) <= 50
    assert strange[-1] == () and all(isinstance(products, tuple) for products in strange)
