//! Prints the CustomResourceDefinition as YAML, or with `--reference` the page that explains its fields;
//! `make generate` writes them to `crds/` and `docs/`.

fn main() {
    if std::env::args().any(|argument| argument == "--reference") {
        print!("{}", psjobs_api::crd::reference());
        return;
    }
    let definition = psjobs_api::crd::definition();
    println!("# Generated from api/src/crd by `make generate`; do not edit.");
    print!("{}", serde_yaml::to_string(&definition).expect("a definition is YAML"));
}
