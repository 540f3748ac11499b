"""Every picture that is saved under test has named axes, and its words lie within its frame.

Import this before the modules that draw.
"""

from diffeqformer.console import figures

new_figure = figures.new_figure


def check(figure) -> None:
    """Check a figure that has just been saved."""
    words = [*figure.legends, *figure.texts]
    words += [figure._suptitle] if figure._suptitle else []
    for axis in figure.axes:
        words += [axis.title, axis.xaxis.label, axis.yaxis.label]
        for number, sides in ((axis.xaxis, ("bottom", "top")), (axis.yaxis, ("left", "right"))):
            ticks = number.get_tick_params()  # an axis that is shared has them once
            has_ticks = any(ticks.get(f"label{side}", True) for side in sides) and len(number.get_ticklocs())
            assert not has_ticks or number.get_label_text(), (figure, axis.get_title(), number.axis_name)
    for word in words:
        place = word.get_window_extent()
        inside = figure.bbox.padded(1)
        if word.get_visible() and place.width and getattr(word, "get_text", lambda: "a legend")():
            assert inside.contains(place.x0, place.y0) and inside.contains(place.x1, place.y1), (word, place, inside)


def checked(*of, **how):
    """`new_figure`, whose figures are checked when they are saved."""
    figure, axes = new_figure(*of, **how)
    save = figure.savefig

    def save_and_check(*to, **options):
        figure.set_dpi(options["dpi"])  # or positions after saving would be those of another resolution
        save(*to, **options)
        check(figure)

    figure.savefig = save_and_check
    return figure, axes


figures.new_figure = checked
