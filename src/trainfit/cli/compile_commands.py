"""What `plan` and `verify` do with `--compile`."""

from __future__ import annotations

from trainfit.cli import cli_options as given
from trainfit.cli.cli_running import present, working
from trainfit.cli.compile_options import CompileFlags, refuse_with_compile
from trainfit.cli.list_options import ListedRequestFlags
from trainfit.cli.solver_options import SolverFlags
from trainfit.errors import OptionError


def compiled_plan(
    target: str,
    budget: str | None,
    asked: ListedRequestFlags,
    compiling: CompileFlags,
    solver: SolverFlags,
    outputs: given.StepOutputFlags,
    output: str | None,
) -> None:
    """Plan a compiled step."""
    others = {name: getattr(outputs, name) for name in ("report", "snapshot", "perfetto", "csv")}
    refuse_with_compile(lists=asked.has_lists, offload=solver.offload, **others)
    refuse_with_compile(solver=solver.solver != "regions", ac_unit=solver.ac_unit, fsdp_unit=solver.fsdp_unit)
    with working(outputs, output=output):
        from trainfit.api.compiled_steps import plan_compiled_step
        from trainfit.plans import plan_store
        from trainfit.report.compiled_plans import compiled_plan_data
        from trainfit.report.text_plans import plan_view

        request = asked.asked(target)[0].single()
        result = plan_compiled_step(request, budget, **compiling.arguments())
    if output is not None and result.feasible:
        plan_store.save_plan(result.plan, output)
    present(outputs, compiled_plan_data(result), plan_view, result)
    result.check()


def verify_compiled(
    target: str, asked: given.VerifyFlags, compiling: CompileFlags, outputs: given.OutputFlags
) -> None:
    """Run a compiled step."""
    refuse_with_compile(way=asked.way, eager=asked.eager, mesh=asked.mesh, report=outputs.report)
    refuse_with_compile(refresh=asked.refresh, csv=outputs.csv)
    plan = asked.compiled_plan()
    if plan is None and asked.plan is not None:
        raise OptionError(
            "--compile takes a plan that trainfit plan --compile has made; leave --compile out."
        )
    with working(outputs):
        from trainfit.api.prove_compiled import verify_compiled_step
        from trainfit.report.compiled_checks import compiled_verification_data, compiled_verification_view

        result = verify_compiled_step(
            asked.request(target, costs="roofline"),
            plan=plan,
            budget=asked.budget,
            force=asked.force,
            runs=asked.runs,
            **compiling.arguments(),
        )
    present(outputs, compiled_verification_data(result), compiled_verification_view, result)
