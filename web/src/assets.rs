//! The files that a browser gets. uPlot draws the curves; its licence (MIT) lies beside it.

/// A file, by the path under which it is served.
#[derive(Clone, Copy, Debug)]
pub struct Asset {
    pub path: &'static str,
    pub text: &'static str,
}

pub const STYLES: [Asset; 2] = [
    Asset { path: "uplot/uPlot.min.css", text: include_str!("page/uplot/uPlot.min.css") },
    Asset { path: "page.css", text: include_str!("page/page.css") },
];

/// In the order in which they are run.
pub const SCRIPTS: [Asset; 4] = [
    Asset { path: "uplot/uPlot.iife.min.js", text: include_str!("page/uplot/uPlot.iife.min.js") },
    Asset { path: "format.js", text: include_str!("page/format.js") },
    Asset { path: "charts.js", text: include_str!("page/charts.js") },
    Asset { path: "page.js", text: include_str!("page/page.js") },
];

const BODY: &str = include_str!("page/body.html");

/// Returns the page with `head` in its head, and `scripts` behind its body.
pub fn page(head: &str, scripts: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>psjobs</title>\n\
         <link rel=\"icon\" href=\"data:,\">\n{head}</head>\n<body>\n{BODY}{scripts}</body>\n</html>\n"
    )
}

/// Returns the page that refers to its files.
pub fn linked() -> String {
    let styles = STYLES.map(|style| format!("<link rel=\"stylesheet\" href=\"/{}\">\n", style.path));
    let scripts = SCRIPTS.map(|script| format!("<script src=\"/{}\"></script>\n", script.path));
    page(&styles.concat(), &scripts.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_small() {
        let size = linked().len() + STYLES.iter().chain(&SCRIPTS).map(|file| file.text.len()).sum::<usize>();
        assert!(size < 100_000, "{size} bytes; docs/web.md says less than 100 kB");
    }
}
