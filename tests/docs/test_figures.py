"""Figures in the documents are those of the records that they name: every phrase here is made of a record's numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.record import RESULTS, is_of_this_code, source_digest
from bench.report import main as write_report
from tests.docs.documents import DOCUMENTS, ROOT, name_of
from tests.docs.figures import cells, check, gain, record, result, speed, words


def test_a_phrase_that_is_not_there_would_be_seen() -> None:
    with pytest.raises(AssertionError, match="does not say"):
        check("README.md", "Spool is 17.3 times faster")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_results_of_older_code_are_named(document: Path) -> None:
    """In each document that quotes one: a reader must not take it for a result of the code beside the page."""
    text = words(document.read_text(encoding="utf-8"))
    named = set(re.findall(r"(?:bench/results/|performance\.md#|bench\.record )(\w+)", text))
    kept = {file.stem for file in RESULTS.glob("*.json")}
    quoted = kept if document.name == "performance.md" else kept & named
    older = {name for name in quoted if not is_of_this_code(record(name))}
    said = re.search(r"measured with older code: ((?:`\w+`,? ?(?:and )?)+)", text)
    assert set(re.findall(r"`(\w+)`", said[1] if said else "")) == older, f"this code is {source_digest()}"


def test_speed_on_the_first_page() -> None:
    table, prompts = cells("decoding_avx512"), record("decoding_avx512")["settings"]["prompts"]
    rows = {
        "Spool, plain, exact": ("plain", None),
        "Spool, `auto` with the demo draft, exact": ("auto", "demo"),
        "Spool, `auto` with prompt lookup, exact": ("auto", "ngram"),
        "vLLM 0.32 on CPU, plain": ("vllm", None),
        "vLLM 0.32 on CPU, prompt lookup": ("vllm-ngram", "ngram"),
        "transformers `generate`": ("transformers", None),
    }
    lines = [
        f"| {name} | {speed(table[system, 1, draft])} | {speed(table[system, 8, draft])} "
        f"| {prompts * table[system, 8, draft]['exact_match']:.0f} of {prompts} |"
        for name, (system, draft) in rows.items()
    ]
    auto = {
        (batch, draft): table["auto", batch, draft]["statistics"]["drafted"]
        for batch in (1, 8)
        for draft in ("demo", "ngram")
    }
    always = {(batch, draft): gain(table["exspec", batch, draft]) for batch in (1, 8) for draft in ("demo", "ngram")}
    other = [speed(table["vllm-draft", batch, "demo"]) for batch in (1, 8)]
    speeds = [table[system, batch, draft]["tokens_per_second"] for system, draft in rows.values() for batch in (1, 8)]
    noise = max(100 * (found["most"] / found["least"] - 1) for found in speeds)
    average = record("decoding_avx512")["settings"]["prompt_tokens"] / prompts
    assert {cell["repeats"] for cell in table.values()} == {2}
    check(
        "README.md",
        *lines,
        f"prompt lookup gives {gain(table['auto', 1, 'ngram'])} times the speed of plain decoding for one sequence",
        f"{prompts} SpecBench prompts in full length ({average:.0f} tokens on average)",
        f"the mean of two measurements, which differ by up to {noise:.0f} %",
        f"runs at {always[1, 'demo']} times the speed of plain decoding at batch 1 and at {always[8, 'demo']} times at "
        "batch 8.",
        f"in all it drafted {auto[1, 'demo']} tokens at batch 1 and {auto[8, 'demo']} at batch 8.",
    )
    check(
        "docs/comparison.md",
        f"`auto` drafted {auto[1, 'demo']} tokens at batch 1 and {auto[8, 'demo']} at batch 8 with the demo draft, and "
        f"{auto[1, 'ngram']} and {auto[8, 'ngram']} with prompt lookup",
        f"gave {always[1, 'demo']} and {always[8, 'demo']} times plain decoding at batch 1 and 8 with the demo draft, "
        f"and {always[1, 'ngram']} and {always[8, 'ngram']} times with prompt lookup",
        f"gave {other[0]} and {other[1]} tokens per second with the demo draft",
        f"assisted decoding {speed(table['assisted', 1, 'demo'])} at batch 1",
    )


def test_speed_with_avx2() -> None:
    table, prompts = cells("decoding_avx2"), record("decoding_avx2")["settings"]["prompts"]
    plain, other = ([speed(table[system, batch, None]) for batch in (1, 8)] for system in ("plain", "vllm"))
    check(
        "docs/comparison.md",
        f"{prompts} prompts, one measurement each",
        f"plain decoding in bfloat16 gave {plain[0]} and {plain[1]} tokens per second, and vLLM in float32, its faster "
        f"dtype there, {other[0]} and {other[1]}",
    )
    assert {cell["repeats"] for cell in table.values()} == {1}
    assert table["vllm", 8, None]["exact_match"] == table["transformers", 8, None]["exact_match"] == 1.0


def test_latency() -> None:
    load = next(load for load in record("load_demo")["loads"] if load["rate"] == 1.0)
    assert load["answered"] == load["requests"]
    first, further = load["first_token_seconds"]["p50"], load["seconds_per_token"]["p50"]
    check(
        "docs/comparison.md",
        f"the first token took {first:.2f} s and each further one {1000 * further:.0f} ms at the median",
    )


def test_where_drafts_gain_and_lose() -> None:
    table = cells("decoding_avx512")
    ratios = {(batch, draft): gain(table["auto", batch, draft]) for batch in (1, 8) for draft in ("demo", "ngram")}
    check(
        "docs/operations.md",
        f"the demo draft gave {ratios[1, 'demo']} times plain decoding at batch 1 and {ratios[8, 'demo']} at batch 8, "
        f"and with prompt lookup {ratios[1, 'ngram']} and {ratios[8, 'ngram']}",
    )
    synthetic = cells("decoding_synthetic_70")
    auto, always = (
        [gain(synthetic[policy, batch, "synthetic_70/draft"]) for batch in (1, 2, 4, 8)]
        for policy in ("auto", "exspec")
    )
    settings = record("decoding_synthetic_70")["settings"]
    poor = [gain(cells("decoding_synthetic_10")["auto", batch, "synthetic_10/draft"]) for batch in (1, 2, 4, 8)]
    check(
        "README.md",
        f"`auto` reaches {auto[0]} times the speed of plain decoding at batch 1, and {auto[1]}, {auto[2]} and "
        f"{auto[3]} times at batch 2, 4 and 8",
    )
    check(
        "docs/comparison.md",
        f"`auto` gives {auto[0]} times plain decoding at batch 1",
        f"and gives {auto[1]}, {auto[2]} and {auto[3]}.",
        f"Drafting in every round gives {always[0]}, {always[1]}, {always[2]} and {always[3]} at batch 1, 2, 4 and 8",
        f"prompts of {settings['prompt_tokens'] / settings['prompts']:.0f} tokens on average",
        f"Where the draft is right once in ten, `auto` gives {min(poor)} to {max(poor)}",
    )


def test_equal_texts_and_logits() -> None:
    runs = {
        "exact_eqspec": "exact, greedy",
        "exact_greedy": "exact, greedy",
        "exact_temperature": "exact, temperature 0.8",
        "no_exact_greedy": "`--no-exact` and no kernels, greedy",
    }
    lines = [
        f"| {name} | `{policy}` | {found['statistics']['drafted']:,} | {found['statistics']['accepted']:,} "
        f"| {found['equal_sequences']} of {found['sequences']} "
        f"| {found['equal_logits']:,} of {found['compared_logits']:,} |"
        for run, name in runs.items()
        for policy, found in result(run)["policies"].items()
    ]
    check("docs/exactness.md", *lines)
    exact = [found for run in runs if run.startswith("exact") for found in result(run)["policies"].values()]
    assert {found["equal_sequences"] for found in exact} == {found["sequences"] for found in exact} == {240}
    greedy, sampled = result("exact_greedy")["policies"], result("exact_temperature")["policies"]
    check(
        "docs/exactness.md",
        f"there `auto` drafted only {greedy['auto']['statistics']['drafted']} and "
        f"{sampled['auto']['statistics']['drafted']} tokens",
    )
    first_page = {
        "greedy": greedy["exspec"],
        "temperature 0.8": sampled["exspec"],
        "drafts only where it expects a gain | greedy": greedy["auto"],
        "without Spool's kernels | greedy": result("no_exact_greedy")["policies"]["exspec"],
    }
    check(
        "README.md",
        *(
            f"{name} | {found['statistics']['drafted']:,} | {found['statistics']['accepted']:,} "
            f"| {found['equal_sequences']} of {found['sequences']} |"
            for name, found in first_page.items()
        ),
    )


def test_price_of_exact_steps() -> None:
    ratios = [step["ratio"] for step in result("exact_steps")["steps"]]
    check("docs/exactness.md", f"took {min(ratios):.2f} to {max(ratios):.2f} times as long as the others")


def test_pauses_after_faults() -> None:
    shared, own = result("chaos"), result("chaos_paced")
    lines = [f"| none | {shared['undisturbed']['longest']:.2f} |", f"| none | {own['undisturbed']['longest']:.2f} |"]
    lines += [f"| {fault['fault']} | {fault['longest']:.2f} |" for fault in shared["faults"]]
    pauses: dict[str, list[str]] = {}
    for fault in own["faults"]:
        pauses.setdefault(fault["fault"], []).append(f"{fault['longest']:.2f}")
    lines += [f"| {fault} | {', '.join(longest)} |" for fault, longest in pauses.items()]
    check("docs/recovery.md", *lines, f"{shared['streams']['answered']} texts", f"{own['streams']['answered']} texts")
    paused = {fault["fault"]: f"{fault['median']:.0f} s" for fault in shared["faults"]}
    target, scheduler = (paused[f"SIGKILL of {process}"] for process in ("a target worker", "the scheduler"))
    check(
        "README.md",
        f"with {shared['streams']['at_once']} streams at a time, the streams paused for {target} at the median when a "
        f"target worker was killed and for {scheduler} when the scheduler was; all {shared['streams']['answered']} "
        "texts equalled plain decoding",
    )


def test_prompts_that_kill() -> None:
    found = result("poison")
    check(
        "docs/recovery.md",
        f"All {found['poisons']} got their error, and {found['targets_lost']} targets were lost",
        f"The {found['streams']['answered']} other texts were those of plain decoding",
        f"{found['pauses']['median']:.0f} s (median) and {found['pauses']['longest']:.0f} s at most",
    )


def test_more_than_can_be_served() -> None:
    found = result("overload")
    refused, seconds = found["refused"], found["refusal_seconds"]

    def growth(process: str) -> tuple[float, float]:
        """From the third of ten parts of the time on, in percent and MiB."""
        tenths = found["processes"][process]["pss_mib_by_tenth"]
        return 100 * (tenths[-1] / tenths[2] - 1), tenths[-1] - tenths[2]

    grown = {process.rpartition(" ")[0]: growth(process) for process in found["processes"]}
    check(
        "docs/recovery.md",
        f"of {found['requests']:,} requests {found['answered']:,} were answered",
        f"{sum(refused.values()):,} refused (HTTP {refused['http']:,}, gRPC {refused['grpc']:,})",
        f"within {1000 * seconds['p50']:.0f} ms and 99 of 100 within {seconds['p99']:.2f} s",
        f"{grown['TargetWorker'][0]:.1f} % in the target worker, {grown['DraftWorker'][0]:.1f} % in the draft worker "
        f"({grown['DraftWorker'][1]:.1f} MiB), {grown['Scheduler'][0]:.1f} % in the scheduler",
    )


def test_a_load_that_comes_and_goes() -> None:
    for agreement in (10, 50, 80):
        found = result(f"load_step_{agreement}")
        assert found["wrong"] == []
        assert found["answered"] == found["requests"]
        asked = [int(one["figures"]["targets_wanted"]) for one in found["decisions"] if one["clients"] == 16]
        tokens = [f"{1000 * one['token_seconds_p50']:.0f}" for one in found["by_step"] if one["clients"] == 16]
        cells = (f"{agreement} %", *map(str, asked), *tokens, str(found["answered"]))
        check("docs/autoscaling.md", f"| {' | '.join(cells)} |")


def test_moving_kv() -> None:
    points = result("kv_movement")["points"]
    check(
        "docs/recovery.md",
        *(
            f"| {point['positions']} | {point['bytes']:,} | {point['recompute_seconds']:.3f} |"
            f" {point['move_seconds']:.3f} |"
            for point in points
        ),
    )


def test_waiting_beside_a_flood() -> None:
    found = result("fairness")

    def rise(name: str) -> tuple[str, str, str]:
        alone, flooded = (1000 * found["first_token_seconds"][part][name] for part in ("alone", "flooded"))
        return f"{alone:.0f}", f"{flooded:.0f}", f"{found['ratio'][name]:.1f}"

    check(
        "docs/benchmarks.md",
        "p50 rises from {} to {} ms, {} times".format(*rise("p50")),
        "p99 from {} to {} ms, {} times".format(*rise("p99")),
    )


def test_several_ranks() -> None:
    def row(step: dict[str, Any]) -> str:
        one, two = step["ranks"]["1"], step["ranks"]["2"]
        parts = (one["step"], two["step"], *(two["exchanges"][kind] for kind in ("orders", "sums", "logits")))
        return f"| {step['sequences']} x {step['rows_each']} | " + " | ".join(f"{part:.1f}" for part in parts) + " |"

    check("docs/benchmarks.md", *map(row, result("ranks_cpu")["steps"]))


def test_streams_beside_offline_decoding() -> None:
    one, eight = (
        (f"{load['served_tokens_per_second']:.1f}", f"{load['offline_tokens_per_second']:.1f}")
        for load in result("served_streams")["loads"]
    )
    check(
        "docs/benchmarks.md",
        f"{one[0]} tokens a second served and {one[1]} offline with one client, {eight[0]} and {eight[1]} with eight",
    )
    check(
        "README.md",
        f"with a selection of {result('served_streams')['prompts']} prompts of SpecBench",
        f"plain decoding gave {one[1]} tokens a second at batch 1 and {eight[1]} at batch 8 without a server, and "
        f"{one[0]} with one client and {eight[0]} with eight",
    )


def test_structured_output() -> None:
    one, several = result("structured")["steps"]
    loss = [100 * (1 - 1 / step["ratio"]) for step in (one, several)]
    check(
        "docs/benchmarks.md",
        f"takes {one['ratio']:.3f} +- {one['error']:.3f} times as long as a free one",
        f"{several['ratio']:.3f} +- {several['error']:.3f} times with four drafts",
        f"loses {loss[0]:.1f} % and {loss[1]:.1f} % of its tokens a second",
    )


def test_drafting_ahead_with_the_demo_pair() -> None:
    found = result("ahead_pair")
    rates = {way["way"]: f"{way['rate']:.1f}" for way in found["ways"]}
    ordinary, ahead = (rates[way] for way in found["best"])
    assert found["equal_outputs"]
    check(
        "docs/benchmarks.md",
        f"Drafting ahead gave {found['ratio']:.2f} times the speed of ordinary speculation, each with its best "
        f"setting, with a standard error of {found['ratio_error']:.2f}. Plain decoding was faster than both: "
        f"{rates['plain']} tokens a second against {ahead} and {ordinary}",
    )


def test_collections_of_schemas() -> None:
    found = result("schema_conformance")
    folders = found["folders"]
    assert not any(folder[wrong] for folder in folders for wrong in ("failed", "differing", "invalid"))

    def total(name: str) -> int:
        return sum(folder[name] for folder in folders)

    suite, bench = (folder["valid"] for folder in folders)
    unchecked = {one["schema"] for folder in folders for one in folder["unchecked"]}
    check(
        "docs/benchmarks.md",
        f"{found['valid']} of {total('schemas'):,} schemas are valid, {suite} of the Test Suite and {bench} of "
        "MaskBench",
        f"{total('refused')} are refused",
        f"{total('cut')} cut, and {len(unchecked)} unchecked",
        f"{total('valid_outputs'):,} are valid and {total('cut_outputs')} cut",
        f"{100 * total('accepted') / total('tokens'):.0f} % had been proposed by the draft",
    )
    check(
        "docs/structured-output.md",
        f"{total('schemas'):,} schemas from the JSON Schema Test Suite and MaskBench",
        f"For {found['valid']} of them every output was complete and valid",
    )


def test_tools_of_others() -> None:
    requests: dict[str, int] = {}
    for run in result("load_tools")["runs"]:
        assert run["errors"] == 0
        requests[run["tool"]] = requests.get(run["tool"], 0) + run["requests"]
    tasks = result("evaluation")["tasks"]
    texts, chat, likelihoods = (
        tasks[name] for name in ("served: questions", "served_chat: questions", "served: facts")
    )
    check(
        "docs/clients.md",
        f"| constant rates of 0.5, 1 and 2 requests a second | {requests['guidellm']} | 0 |",
        f"| chat, streamed, 8 at a time | {requests['AIPerf']} | 0 |",
        f"| completions, 8 at a time | {requests['vllm bench serve --backend openai']} | 0 |",
        f"| chat, 8 at a time | {requests['vllm bench serve --backend openai-chat']} | 0 |",
        f"{texts['equal']} of {texts['answers']} texts, {chat['equal']} of {chat['answers']} chat answers",
        f"{likelihoods['answers']} log-likelihoods differ by at most {likelihoods['largest_difference'] + 5e-6:.5f},",
    )
    assert all(result("frameworks")["equal"].values())


def test_the_page_of_all_figures_is_as_the_results_make_it(tmp_path: Path) -> None:
    assert write_report(["--docs", str(tmp_path)]) == 0
    for made in (tmp_path / "performance.md", *(tmp_path / "figures").iterdir()):
        kept = ROOT / "docs" / made.relative_to(tmp_path)
        assert kept.read_bytes() == made.read_bytes(), "run python -m bench.report"


def test_every_record_is_somewhere_in_the_documents() -> None:
    """A record that nobody quotes or shows is one that nobody repeats."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    text = "\n".join(document.read_text(encoding="utf-8") for document in documents)
    unseen = [file.name for file in sorted(Path(RESULTS).glob("*.json")) if file.stem not in text]
    assert not unseen
