//! A visitor of the page: a service account that may list the jobs of one namespace, and what its browser requests.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures::future::try_join_all;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use crate::DEADLINE;

const NAME: &str = "visitor";

/// Somebody who may list the jobs of a namespace.
pub struct Visitor {
    accounts: Api<ServiceAccount>,
}

impl Visitor {
    pub async fn new(client: &Client, namespace: &str) -> Result<Self> {
        let (accounts, params) = (Api::namespaced(client.clone(), namespace), PostParams::default());
        let metadata = json!({"name": NAME, "namespace": namespace});
        accounts.create(&params, &serde_json::from_value(json!({ "metadata": metadata }))?).await?;
        let rule = json!({"apiGroups": ["psjobs.dev"], "resources": ["parameterserverjobs"], "verbs": ["list"]});
        let role = serde_json::from_value(json!({"metadata": metadata, "rules": [rule]}))?;
        Api::<Role>::namespaced(client.clone(), namespace).create(&params, &role).await?;
        let binding = serde_json::from_value(json!({
            "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}],
        }))?;
        Api::<RoleBinding>::namespaced(client.clone(), namespace).create(&params, &binding).await?;
        let wanted = json!({
            "namespace": namespace, "verb": "list", "group": "psjobs.dev", "resource": "parameterserverjobs",
        });
        until_allowed(client, &format!("system:serviceaccount:{namespace}:{NAME}"), wanted).await?;
        Ok(Self { accounts })
    }

    /// Returns a token that psjobs-web has not seen.
    pub async fn token(&self) -> Result<String> {
        let wanted: TokenRequest = serde_json::from_value(json!({"spec": {"audiences": []}}))?;
        let made = self.accounts.create_token_request(NAME, &PostParams::default(), &wanted).await?;
        Ok(made.status.context("the API server gave no token")?.token)
    }
}

/// Waits until the authorizer, which learns of roles from a watch, allows something.
pub async fn until_allowed(client: &Client, user: &str, attributes: Value) -> Result<()> {
    let review = json!({"spec": {"user": user, "resourceAttributes": attributes}});
    let review: SubjectAccessReview = serde_json::from_value(review)?;
    let allowed = async {
        let mut looks = tokio::time::interval(Duration::from_millis(100));
        loop {
            looks.tick().await;
            let answer = Api::all(client.clone()).create(&PostParams::default(), &review).await?;
            if answer.status.is_some_and(|status| status.allowed) {
                return anyhow::Ok(());
            }
        }
    };
    tokio::time::timeout(DEADLINE, allowed).await.with_context(|| format!("{user} does not get its rights"))?
}

/// Requests the page, then the styles and scripts that it names, all at once; returns their bytes.
pub async fn load(address: SocketAddr, token: &str) -> Result<usize> {
    let page = get(address, "/", token).await?;
    let names = page.split("<link rel=\"stylesheet\" href=\"").chain(page.split("<script src=\"")).filter_map(|rest| {
        let (name, _) = rest.split_once('"')?;
        name.starts_with('/').then_some(name)
    });
    let files = try_join_all(names.map(|name| get(address, name, token))).await?;
    if files.len() < 2 {
        bail!("the page names {} files; expected its styles and scripts", files.len());
    }
    Ok(page.len() + files.iter().map(String::len).sum::<usize>())
}

/// Returns the body of an answer that is 200.
pub async fn get(address: SocketAddr, path: &str, token: &str) -> Result<String> {
    let mut answer = open(address, path, token).await?;
    let mut body = String::new();
    answer.read_to_string(&mut body).await?;
    Ok(body)
}

/// Server-sent events of the page.
pub struct Events(BufReader<TcpStream>);

impl Events {
    pub async fn open(address: SocketAddr, path: &str, token: &str) -> Result<Self> {
        open(address, path, token).await.map(Self)
    }

    /// Reads the next event.
    pub async fn next(&mut self) -> Result<Value> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.0.read_line(&mut line).await? == 0 {
                bail!("the events of the page ended");
            }
            if let Some(data) = line.strip_prefix("data:") {
                return Ok(serde_json::from_str(data)?);
            }
        }
    }

    /// Reads until the event that is wanted; when it was read.
    pub async fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Result<Instant> {
        let reading = async {
            loop {
                if wanted(&self.next().await?) {
                    return anyhow::Ok(Instant::now());
                }
            }
        };
        tokio::time::timeout(DEADLINE, reading).await.context("the page does not show the change")?
    }
}

/// Requests a path; the answer is 200, and its body is next. It comes in one piece, not in chunks, because of the 1.0.
async fn open(address: SocketAddr, path: &str, token: &str) -> Result<BufReader<TcpStream>> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = BufReader::new(stream);
    let (mut status, mut header) = (String::new(), String::new());
    answer.read_line(&mut status).await?;
    if status.split(' ').nth(1) != Some("200") {
        bail!("the page answers {path} with {:?}; expected 200", status.trim());
    }
    while header != "\r\n" {
        header.clear();
        if answer.read_line(&mut header).await? == 0 {
            bail!("the answer to {path} ended in its headers");
        }
    }
    Ok(answer)
}
