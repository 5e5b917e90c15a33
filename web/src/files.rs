//! The files of the page as a browser gets them, and the headers that protect its reader.

use axum::Router;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;

use crate::assets::{self, Asset, SCRIPTS, STYLES};

/// Nothing of another place is loaded, run, or asked; and no other page shows this one in a frame.
pub(crate) const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; \
                                 connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Serves the page at `/`, and the files that it refers to.
pub fn files<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let mut router = Router::new()
        .route("/", get(async || ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], assets::linked())));
    for Asset { path, text } in STYLES.into_iter().chain(SCRIPTS) {
        let kind = if path.ends_with(".css") { "text/css" } else { "text/javascript" };
        router = router
            .route(&format!("/{path}"), get(async move || ([(header::CONTENT_TYPE, kind)], text).into_response()));
    }
    router
}

/// Adds to an answer what protects its reader. A content policy that it has stays.
pub fn protect(mut response: Response) -> Response {
    let headers: [(HeaderName, &str); 4] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    for (name, value) in headers {
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}
