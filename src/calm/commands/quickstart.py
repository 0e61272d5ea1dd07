"""The `calm quickstart` command: runs the stages, then prints scores, samples and suggested commands."""

from pathlib import Path

from calm import console
from calm.quickstart.plan import Plan
from calm.quickstart.report import next_commands
from calm.quickstart.run import REPORT
from calm.quickstart.run import quickstart as run


def quickstart(plan: Plan, output: Path, as_json: bool) -> None:
    results = run(plan, output, console.StageScreen())
    if as_json:
        console.print_json(results)
        return
    for table in console.scores_tables(results["scores"]):
        console.stdout.print(table)
    console.show_samples(results["samples"])
    console.stdout.print(f"Report: {output / REPORT}. Next steps:", soft_wrap=True)
    print(next_commands(output), end="")
