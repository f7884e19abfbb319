// Asks the built site's own search, as a page of it does:  node site_search.js HTML QUERY...
// Prints the address that each query finds first, then the same with the pages' weights left out.
const { readFileSync, readdirSync } = require("fs");
const [html, ...queries] = process.argv.slice(2);

let answer, search;
Object.assign(globalThis, {
  self: globalThis,
  postMessage: (message) => answer(message.data),
  addEventListener: (_, listener) => { search = listener; },
});
const workers = `${html}/assets/javascripts/workers`;
const worker = readdirSync(workers).find((name) => name.endsWith(".js"));
require("vm").runInThisContext(readFileSync(`${workers}/${worker}`, "utf8"));
const ask = (type, data) => new Promise((done) => { answer = done; search({ data: { type, data } }); });

(async () => {
  const index = JSON.parse(readFileSync(`${html}/search/search_index.json`, "utf8"));
  const plain = { ...index, docs: index.docs.map(({ boost, ...entry }) => entry) };
  const found = [];
  for (const data of [index, plain]) {
    await ask(0, { ...data, options: {} });
    const pages = [];
    for (const query of queries) pages.push((await ask(2, query)).items[0][0].location);
    found.push(pages);
  }
  console.log(JSON.stringify(found));
})();
