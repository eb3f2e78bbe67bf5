// Read the data, and draw every part in its place: what is seen first at once, the rest when there is time.

const PARTS = { memory: memoryPart, treemap: treemapPart, table: tablePart, trade_off: tradeOffPart, bars: barsPart };

function start() {
  const data = JSON.parse(document.getElementById("tf-data").textContent);
  const places = [...document.querySelectorAll(".tf-part")];
  startTheme();
  const drawNext = () => {
    const place = places.shift();
    if (!place) {
      document.documentElement.dataset.ready = "true";
      return;
    }
    const part = data.parts[Number(place.dataset.part)];
    place.replaceChildren(PARTS[part.kind](part, data.strings));
    setTimeout(drawNext, 0);
  };
  requestAnimationFrame(() => setTimeout(drawNext, 0));
}

start();
