//! Plots as SVG: lines over an axis, and bars. Pure: numbers in, text out.

use std::fmt::Write as _;

/// A curve, or a group of bars.
pub struct Series<'a> {
    pub name: &'a str,
    pub color: &'a str,
    pub points: Vec<(f64, f64)>,
    /// Drawn thin and pale, and not named.
    pub faint: bool,
}

/// An axis.
pub struct Axis<'a> {
    pub title: &'a str,
    pub from: f64,
    pub to: f64,
    /// Equal distances are equal factors; `from` is above 0 then.
    pub log: bool,
}

impl Axis<'_> {
    /// Returns where a value lies, from 0 to 1.
    fn share(&self, value: f64) -> f64 {
        let place = |value: f64| if self.log { value.ln() } else { value };
        (place(value) - place(self.from)) / (place(self.to) - place(self.from))
    }

    /// Returns the numbers that are written at it.
    fn ticks(&self) -> Vec<f64> {
        if self.log { powers(self.from, self.to) } else { ticks(self.from, self.to) }
    }
}

/// Colours of Okabe and Ito, which people with any sight can distinguish.
pub const COLORS: [&str; 6] = ["#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#e69f00"];
pub const WIDTH: f64 = 640.0;
pub const HEIGHT: f64 = 330.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 46.0;

/// Curves over a common axis.
pub fn lines(x: &Axis, y: &Axis, series: &[Series]) -> String {
    let mut svg = frame(y);
    for tick in x.ticks() {
        let at = place_x(x, tick);
        let below = HEIGHT - BOTTOM;
        let _ = write!(svg, r#"<line x1="{at:.1}" y1="{below}" x2="{at:.1}" y2="{:.1}" class="axis"/>"#, below + 4.0);
        let _ = write!(svg, r#"<text x="{at:.1}" y="{:.1}" class="tick mid">{}</text>"#, below + 18.0, label(tick));
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    let _ = write!(svg, r#"<text x="{middle}" y="{:.1}" class="title mid">{}</text>"#, HEIGHT - 8.0, x.title);
    for curve in series {
        let points: Vec<String> = (curve.points.iter())
            .filter(|(px, py)| px.is_finite() && py.is_finite())
            .map(|(px, py)| format!("{:.1},{:.1}", place_x(x, *px), place_y(y, *py)))
            .collect();
        let class = if curve.faint { "faint" } else { "curve" };
        let _ = write!(svg, r#"<polyline class="{class}" stroke="{}" points="{}"/>"#, curve.color, points.join(" "));
    }
    svg + "</svg>"
}

/// Groups of bars, one group for each of `groups`, one bar in it for each series; a series' points are (group, value).
pub fn bars(groups: &[&str], y: &Axis, series: &[Series]) -> String {
    let mut svg = frame(y);
    let group = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
    let bar = group * 0.8 / series.len().max(1) as f64;
    for (number, name) in groups.iter().enumerate() {
        let at = LEFT + group * (number as f64 + 0.5);
        let _ = write!(svg, r#"<text x="{at:.1}" y="{:.1}" class="tick mid">{name}</text>"#, HEIGHT - BOTTOM + 18.0);
    }
    for (number, row) in series.iter().enumerate() {
        for (at, value) in row.points.iter().filter(|(_, value)| value.is_finite()) {
            let left = LEFT + group * (at + 0.1) + bar * number as f64;
            let (top, base) = (place_y(y, *value), place_y(y, y.from));
            let (wide, high) = (bar * 0.92, (base - top).max(0.0));
            let name = row.name;
            let _ = write!(
                svg,
                r#"<rect x="{left:.1}" y="{top:.1}" width="{wide:.1}" height="{high:.1}" fill="{}"><title>{name}: {}</title></rect>"#,
                row.color,
                label(*value)
            );
        }
    }
    svg + "</svg>"
}

/// One bar for each name, in its own colour.
pub fn columns(values: &[(&str, &str, f64)], y: &Axis) -> String {
    let mut svg = frame(y);
    let wide = (WIDTH - LEFT - RIGHT) / values.len().max(1) as f64;
    let base = place_y(y, y.from);
    for (number, (name, color, value)) in values.iter().enumerate() {
        let (left, top) = (LEFT + wide * (number as f64 + 0.2), place_y(y, *value));
        let (middle, high) = (left + wide * 0.3, base - top);
        let _ = write!(
            svg,
            r#"<rect x="{left:.1}" y="{top:.1}" width="{:.1}" height="{high:.1}" fill="{color}"/><text x="{middle:.1}" y="{:.1}" class="tick mid">{}</text><text x="{middle:.1}" y="{:.1}" class="tick mid">{name}</text>"#,
            wide * 0.6,
            top - 5.0,
            label(*value),
            base + 18.0
        );
    }
    svg + "</svg>"
}

/// The picture's edge, the horizontal lines and their numbers.
fn frame(y: &Axis) -> String {
    let mut svg = format!(r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">"#);
    let right = WIDTH - RIGHT;
    for tick in y.ticks() {
        let at = place_y(y, tick);
        let _ = write!(svg, r#"<line x1="{LEFT}" y1="{at:.1}" x2="{right}" y2="{at:.1}" class="grid"/>"#);
        let _ =
            write!(svg, r#"<text x="{:.1}" y="{:.1}" class="tick end">{}</text>"#, LEFT - 6.0, at + 4.0, label(tick));
    }
    let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
    let _ = write!(svg, r#"<text transform="translate(14 {middle}) rotate(-90)" class="title mid">{}</text>"#, y.title);
    svg
}

fn place_x(axis: &Axis, value: f64) -> f64 {
    LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)
}

/// Values off the axis lie on its ends.
fn place_y(axis: &Axis, value: f64) -> f64 {
    HEIGHT - BOTTOM - axis.share(value).clamp(0.0, 1.0) * (HEIGHT - TOP - BOTTOM)
}

/// About six round numbers from `from` to `to`.
fn ticks(from: f64, to: f64) -> Vec<f64> {
    let rough = (to - from) / 6.0;
    if !(rough.is_finite() && rough > 0.0) {
        return vec![from];
    }
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough).unwrap_or(rough);
    let first = (from / step - 1e-9).ceil() as i64;
    (first..).map(|n| n as f64 * step).take_while(|tick| *tick <= to + step * 1e-9).collect()
}

/// The powers of ten from `from` to `to`.
fn powers(from: f64, to: f64) -> Vec<f64> {
    let exponents = (from.log10() - 1e-9).ceil() as i32..=(to.log10() + 1e-9).floor() as i32;
    exponents.map(|exponent| 10_f64.powi(exponent)).collect()
}

fn label(value: f64) -> String {
    let text = match value.abs() {
        big if big >= 100.0 => format!("{value:.0}"),
        middling if middling >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_axis() {
        for (from, to, want) in [
            (0.0, 10.0, vec![0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
            (0.9, 0.98, vec![0.9, 0.92, 0.94, 0.96, 0.98]),
            (3.0, 3.0, vec![3.0]),
        ] {
            let got = ticks(from, to);
            assert_eq!(got.len(), want.len(), "{got:?}");
            assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-9), "{got:?}");
        }
    }

    #[test]
    fn labels_have_no_needless_digits() {
        for (value, want) in [(0.0, "0"), (0.92, "0.92"), (2.0, "2"), (12.5, "12.5"), (40.0, "40"), (1200.0, "1200")] {
            assert_eq!(label(value), want);
        }
    }

    #[test]
    fn equal_factors_are_equal_distances_on_a_logarithmic_axis() {
        let axis = Axis { title: "MB", from: 10.0, to: 100_000.0, log: true };
        assert_eq!(
            axis.ticks().iter().map(|tick| label(*tick)).collect::<Vec<_>>(),
            ["10", "100", "1000", "10000", "100000"]
        );
        for (value, want) in [(10.0, 0.0), (100.0, 0.25), (1000.0, 0.5), (100_000.0, 1.0)] {
            assert!((axis.share(value) - want).abs() < 1e-9, "{value}");
        }
    }

    #[test]
    fn a_curve_begins_and_ends_at_the_axes() {
        let axis = |title| Axis { title, from: 0.0, to: 1.0, log: false };
        let series =
            Series { name: "a", color: "red", points: vec![(0.0, 0.0), (1.0, 1.0), (f64::NAN, 1.0)], faint: false };
        let svg = lines(&axis("x"), &axis("y"), &[series]);
        let (low, high, right) = (HEIGHT - BOTTOM, TOP, WIDTH - RIGHT);
        assert!(svg.contains(&format!(r#"points="{LEFT:.1},{low:.1} {right:.1},{high:.1}""#)), "{svg}");
    }
}
