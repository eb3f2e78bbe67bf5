"""Changes to a training step that need less memory or less time, each carried out on the step itself.

A change is made where the step is built, with the code that makes it in a real run: what it does to memory
and time is captured, not derived.

- `change`: `Change`, what each kind offers, and how exact results stay
- `situation`: what is known of a step before it is changed
- `kinds/`: one file for each kind of change, found by its name
- `changed_steps`: a target with changes
"""
