//! How a visitor gives a token: a program as `Authorization: Bearer TOKEN`, a browser in a form, after which it has a cookie.

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};

/// Beginning of the cookie's name.
const COOKIE: &str = "psjobs-token";
/// Bytes of a token that is looked at; those of service accounts have about 1,000.
const LONGEST: usize = 16 << 10;
/// Bytes of a token that a browser keeps as a cookie.
const LONGEST_COOKIE: usize = 3_800;

/// The form is sent to this server alone, and the page runs no script.
const POLICY: &str = "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; \
                      frame-ancestors 'none'";

const ADVICE: &str = "kubectl create token SERVICE_ACCOUNT --namespace NAMESPACE";

/// Returns the token of a request: that of its header, else that of its cookie.
pub fn token(headers: &HeaderMap) -> Option<String> {
    let texts = |name| headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    let bearer = texts(header::AUTHORIZATION).filter_map(|value| value.strip_prefix("Bearer "));
    let pairs = texts(header::COOKIE).flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.split_once('='));
    let cookie = cookie(headers);
    let cookies = pairs.filter(|(name, _)| name.trim() == cookie).map(|(_, value)| value);
    bearer.chain(cookies).map(str::trim).find(|token| is_token(token)).map(str::to_owned)
}

/// Returns the name of the cookie for the address of a request. It has the port, because cookies do not: two pages that are
/// forwarded to ports of one machine need two names.
fn cookie(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let is_port = |port: &str| (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit());
    match host.rsplit_once(':').map(|(_, port)| port).filter(|port| is_port(port)) {
        Some(port) => format!("{COOKIE}-{port}"),
        None => COOKIE.to_owned(),
    }
}

/// Returns the token in the form that a browser sends, as `token=TOKEN` in plain text.
pub fn of_form(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?.trim().strip_prefix("token=")?.trim();
    is_token(text).then(|| text.to_owned())
}

/// Says if a text can be a token: nothing in it ends a header or a cookie.
fn is_token(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_graphic() && !b"\",;\\".contains(&byte);
    !text.is_empty() && text.len() <= LONGEST && text.bytes().all(fits)
}

/// Says if the form was sent by another site's page, which must not choose the token of a visitor.
pub fn is_foreign(headers: &HeaderMap) -> bool {
    headers.get("sec-fetch-site").is_some_and(|site| site != "same-origin" && site != "none")
}

/// Lets a browser keep a token, until it is closed, and sends it to the page.
pub fn enter(token: &str, headers: &HeaderMap) -> Response {
    if token.len() > LONGEST_COOKIE {
        return refuse(headers, "A browser cannot keep a token of this length; use one of a service account.");
    }
    let is_encrypted = headers.get("x-forwarded-proto").is_some_and(|protocol| protocol == "https");
    let secure = if is_encrypted { "; Secure" } else { "" };
    let cookie = format!("{}={token}; HttpOnly; SameSite=Strict; Path=/{secure}", cookie(headers));
    (StatusCode::SEE_OTHER, [(header::SET_COOKIE, cookie), (header::LOCATION, "/".to_owned())]).into_response()
}

/// Answers 401 with what to do: to a browser as a form, to a program as JSON.
pub fn refuse(headers: &HeaderMap, why: &str) -> Response {
    let kinds = headers.get(header::ACCEPT).and_then(|kinds| kinds.to_str().ok()).unwrap_or_default();
    let is_page = kinds.contains("text/html");
    if is_page {
        let headers = [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, POLICY)];
        return (StatusCode::UNAUTHORIZED, headers, form(why)).into_response();
    }
    let advice = format!("{why} Send `Authorization: Bearer TOKEN`; `{ADVICE}` makes one.");
    let body = serde_json::json!({ "error": advice }).to_string();
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, headers, body).into_response()
}

/// The form; `why` is a text of this file or of `access.rs`, without markup. It is sent to the address of the page, whose part
/// behind # names a job: the browser keeps that.
fn form(why: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>psjobs</title>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<link rel=\"icon\" href=\"data:,\">\n\
         <link rel=\"stylesheet\" href=\"/page.css\">\n\
         </head>\n<body>\n<header><h1>psjobs</h1></header>\n<main>\n<p id=\"why\">{why}</p>\n\
         <form method=\"post\" enctype=\"text/plain\">\n\
         <p><label>Token <input type=\"password\" name=\"token\" autocomplete=\"off\" required autofocus \
         aria-describedby=\"why\"></label>\n\
         <button>Show the jobs</button></p>\n</form>\n\
         <p>This makes one for an hour: <code>{ADVICE}</code></p>\n</main>\n</body>\n</html>\n"
    )
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(all: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |&(name, value): &(&'static str, &'static str)| {
            (header::HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        all.iter().map(pair).collect()
    }

    #[test]
    fn a_token_is_in_the_header_or_in_the_cookie() {
        for (given, wanted) in [
            (&[][..], None),
            (&[("authorization", "Bearer a.b-c_d")][..], Some("a.b-c_d")),
            (&[("authorization", "Basic a")][..], None),
            (&[("authorization", "Bearer ")][..], None),
            (&[("authorization", "Bearer a b")][..], None),
            (&[("cookie", "x=1; psjobs-token=abc; y=2")][..], Some("abc")),
            (&[("cookie", "other=abc")][..], None),
            (&[("host", "localhost:8080"), ("cookie", "psjobs-token=a; psjobs-token-8081=b")][..], None),
            (&[("host", "localhost:8081"), ("cookie", "psjobs-token=a; psjobs-token-8081=b")][..], Some("b")),
            (&[("cookie", "psjobs-token=abc"), ("authorization", "Bearer first")][..], Some("first")),
        ] {
            assert_eq!(token(&headers(given)).as_deref(), wanted, "{given:?}");
        }
        for (body, wanted) in [("token=abc\r\n", Some("abc")), ("token=\r\n", None), ("abc", None), ("token=a;b", None)]
        {
            assert_eq!(of_form(body.as_bytes()).as_deref(), wanted, "{body}");
        }
    }

    #[test]
    fn the_cookie_has_the_port_of_the_address_in_its_name() {
        for (host, wanted) in [
            ("", "psjobs-token"),
            ("jobs.example.com", "psjobs-token"),
            ("localhost:8080", "psjobs-token-8080"),
            ("[::1]:8080", "psjobs-token-8080"),
            ("[::1]", "psjobs-token"),
            ("localhost:", "psjobs-token"),
            ("localhost:1=x", "psjobs-token"),
            ("localhost:123456", "psjobs-token"),
        ] {
            assert_eq!(cookie(&headers(&[("host", host)])), wanted, "{host}");
        }
        assert_eq!(cookie(&HeaderMap::new()), "psjobs-token");
    }

    #[test]
    fn a_browser_keeps_the_token_where_no_script_and_no_other_site_reaches_it() {
        for (given, wanted) in [
            (&[][..], "psjobs-token=abc; HttpOnly; SameSite=Strict; Path=/"),
            (&[("x-forwarded-proto", "https")][..], "psjobs-token=abc; HttpOnly; SameSite=Strict; Path=/; Secure"),
            (&[("host", "localhost:8080")][..], "psjobs-token-8080=abc; HttpOnly; SameSite=Strict; Path=/"),
        ] {
            let answer = enter("abc", &headers(given));
            assert_eq!(answer.status(), StatusCode::SEE_OTHER);
            assert_eq!(answer.headers()[header::SET_COOKIE], wanted);
        }
        assert_eq!(enter(&"a".repeat(4_000), &HeaderMap::new()).status(), StatusCode::UNAUTHORIZED);
    }

    #[test]
    fn another_site_does_not_choose_the_token() {
        for (given, wanted) in [
            (&[][..], false),
            (&[("sec-fetch-site", "same-origin")][..], false),
            (&[("sec-fetch-site", "cross-site")][..], true),
        ] {
            assert_eq!(is_foreign(&headers(given)), wanted, "{given:?}");
        }
    }

    #[test]
    fn a_browser_gets_a_form_and_a_program_json() {
        for (given, kind) in [
            (&[("accept", "text/html,*/*")][..], "text/html; charset=utf-8"),
            (&[("accept", "text/event-stream")][..], "application/json"),
            (&[][..], "application/json"),
        ] {
            let answer = refuse(&headers(given), "There is no token.");
            assert_eq!(
                (answer.status(), &answer.headers()[header::CONTENT_TYPE]),
                (StatusCode::UNAUTHORIZED, &HeaderValue::from_static(kind))
            );
        }
    }
}
