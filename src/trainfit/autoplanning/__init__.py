"""Plans that are made where the training runs, for the step that is about to run.

- `at_hand.py` says how much memory the present device has for the step, and for which device to plan;
- `autoplan_result.py` is what comes out, in one line too, which `announcing.py` puts into the log;
- `rank_answers.py` lets processes that train together ask each other;
- `agreed_plan.py` finds one plan that is good for all of them;
- `plan_here.py` captures the step of a running program, plans it, and applies the plan: `autoplan`;
- `trainer_step.py` is the step that Hugging Face's Trainer runs, on the batches that it is about to train on;
- `callback_plan.py` is what callbacks of all trainers share;
- `trainer_callback.py` lets it apply a plan, given or made so, and is the only file that loads transformers.

The same for Lightning is `trainfit.lightning`.
"""
