use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::*;
use crate::assets::{Asset, SCRIPTS, STYLES};
use crate::files::POLICY;

struct Nothing;

impl Logs for Nothing {
    fn tail<'a>(
        &'a self,
        job: &'a str,
        process: &'a str,
    ) -> Pin<Box<dyn Future<Output = Result<String, String>> + Send + 'a>> {
        Box::pin(async move {
            match process {
                "ps-0" => Ok(format!("<b>{job}</b>")),
                _ => Err(format!("{job} has no process {process}")),
            }
        })
    }
}

struct Running {
    address: String,
    site: Site,
    server: JoinHandle<io::Result<()>>,
}

async fn start() -> Running {
    let site = Site { board: Arc::default(), logs: Arc::new(Nothing), token: Token::random() };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it listens").to_string();
    let server = tokio::spawn(serve(listener, site.clone()));
    Running { address, site, server }
}

impl Running {
    /// Sends a request, and returns the connection.
    async fn open(&self, path: &str, headers: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).await.expect("it listens");
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.expect("it reads");
        BufReader::new(stream)
    }

    async fn get(&self, path: &str, headers: &str) -> String {
        let mut answer = String::new();
        self.open(path, headers).await.read_to_string(&mut answer).await.expect("it answers");
        answer
    }

    fn bearer(&self) -> String {
        format!("Authorization: Bearer {}\r\n", self.site.token.as_str())
    }
}

#[tokio::test]
async fn nothing_is_served_without_the_token() {
    let running = start().await;
    let other = format!("Authorization: Bearer {}\r\n", Token::random().as_str());
    let wrong = format!("Cookie: psjobs-1={}\r\n", running.site.token.as_str());
    for path in ["/", "/?token=", "/?token=0", "/events", "/events/a/b", "/logs/ps-0/a", "/page.js", "/nothing"] {
        for headers in ["", &other, &wrong] {
            let answer = running.get(path, headers).await;
            assert!(answer.starts_with("HTTP/1.1 401 "), "{path}: {answer}");
            assert!(answer.contains(POLICY) && answer.ends_with(UNAUTHORIZED), "{path}: {answer}");
        }
    }
}

#[tokio::test]
async fn the_address_with_the_token_gives_a_cookie() {
    let running = start().await;
    let token = running.site.token.as_str();
    let answer = running.get(&format!("/?token={token}"), "").await;
    assert!(answer.starts_with("HTTP/1.1 303 ") && answer.contains("\r\nlocation: /\r\n"), "{answer}");
    let port = running.address.rsplit(':').next().expect("a port");
    let cookie = format!("psjobs-{port}={token}");
    assert!(answer.contains(&format!("set-cookie: {cookie}; HttpOnly; SameSite=Lax; Path=/")), "{answer}");
    let page = running.get("/", &format!("Cookie: other=1; {cookie}\r\n")).await;
    assert!(page.starts_with("HTTP/1.1 200 ") && page.contains("<script src=\"/page.js\">"), "{page}");
    assert!(page.contains(POLICY) && !page.contains(token), "{page}");
    for Asset { path, text } in STYLES.into_iter().chain(SCRIPTS) {
        let file = running.get(&format!("/{path}"), &running.bearer()).await;
        assert!(file.starts_with("HTTP/1.1 200 ") && file.ends_with(text), "{path}");
        assert!(page.contains(&format!("\"/{path}\"")), "{path}");
    }
}

#[tokio::test]
async fn logs_are_text() {
    let running = start().await;
    let log = running.get("/logs/ps-0/default/mnist", &running.bearer()).await;
    assert!(log.contains("content-type: text/plain") && log.ends_with("<b>default/mnist</b>"), "{log}");
    let none = running.get("/logs/ps-9/mnist", &running.bearer()).await;
    assert!(none.starts_with("HTTP/1.1 404 ") && none.ends_with("mnist has no process ps-9"), "{none}");
}

#[tokio::test]
async fn a_browser_gets_every_change_and_the_last_one_before_the_server_ends() {
    let running = start().await;
    let board = running.site.board.clone();
    board.change("a/b", |job, curves| {
        job.phase = "Running".into();
        curves.push("loss", None, 1, 2, 0.5);
    });
    let mut events = running.open("/events/a/b", &running.bearer()).await;
    let mut next = async || {
        let mut line = String::new();
        while !line.starts_with("data:") {
            line.clear();
            assert!(events.read_line(&mut line).await.expect("it answers") > 0, "an event");
        }
        serde_json::from_str::<serde_json::Value>(&line["data:".len()..]).expect("JSON")
    };
    let first = next().await;
    assert_eq!((&first["phase"], &first["curves"]["curves"][0]["points"][0]), (&"Running".into(), &1.into()));
    board.change("a/b", |job, _| job.progress.step = 7);
    assert_eq!(next().await["progress"]["step"], 7);
    board.change("a/b", |job, _| job.is_over = true);
    board.close();
    assert_eq!(next().await, serde_json::json!({"isOver": true}));
    running.server.await.expect("no panic").expect("it ends");
}
