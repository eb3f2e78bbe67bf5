"""Results as one HTML file that opens anywhere, and as what a notebook shows of them.

page             `write_page`: a result as a file
saved_report     `save_report`: the same from Python
page_sections    the sections of each kind of result
diff_page        the page of a diff
calibrated_page  the page of a calibration
fit_page         the page of ways to fit
peak_places      what dominates a peak: a category, and which layers or operators have it
compared_page    the page of one step on several devices
size_page        the page of the largest size
page_parts       what a page is put together from: sections, and the pictures and tables in them
page_answers     the first screen of each kind of result, in words and figures
first_screen     the first screen as HTML
notebook_views   what a notebook shows: the first screen and the memory picture
memory_columns   memory over the step, as columns
queue_lanes      what runs when on each queue, as columns
module_columns   the modules: memory at the peak, time
trade_offs       plans and the usual ways: memory against time, and what each recomputes
page_tables      tables of operators, regions, ranks, methods
static_picture   the memory picture as SVG, where no script runs
embedding        data and scripts inside of HTML: nothing in them can become markup

`assets/` has the page's style and scripts, written by hand and put into the page as they are. Nothing is
loaded from anywhere.
"""
