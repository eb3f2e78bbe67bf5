"""Which changes to a step, together with a plan, make it fit and run fastest.

- `fit_results`: `FitResult`, what leaves
- `way_candidates`: one combination of changes, captured, and planned if it has to be
- `lent_plans`: plans that were made for one combination, tried on others
- `guessed_times`: how long a step with several changes may take
- `shallow_steps`: what a step of a deep model takes, worked out from few layers
- `way_search`: which combinations are looked at, and in which order
- `way_ranking`: which of those that fit are worth showing
"""
